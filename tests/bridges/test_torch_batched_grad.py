"""is_grads_batched and vectorize=True: mapped as one by one."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd.functional import hessian, jacobian  # noqa: E402
from torch_data import assert_equal, tensors  # noqa: E402

import cuflash.torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]

# A few sums of products of numbers of size 1, in two orders.
TOLERANCE = 64 * torch.finfo(torch.float64).eps
SIZES = {"seqlen_q": 2, "seqlen_k": 3, "head_dim": 2, "head_dim_v": 2}


def inputs():
    """Return q, k, v, bias and sink."""
    bias = tensors(seqlen_q=3, num_heads_q=1, head_dim=1)[0].reshape(2, 3)
    return (
        *tensors(**SIZES),
        bias,
        torch.tensor([0.5, -1.0, 2.0, 0.0]).double(),
    )


def attention(q, k, v, bias, sink):
    return cuflash.torch.attention(
        q, k, v, bias=bias, sink=sink, return_lse=True
    )


def loss(*inputs):
    out, lse = attention(*inputs)
    return out.square().sum() + (lse * out.sum(-1).mT).sum()


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobian(strategy):
    got = jacobian(attention, inputs(), vectorize=True, strategy=strategy)
    assert_close(got, jacobian(attention, inputs()))


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_hessian(strategy):
    x, *others = inputs()

    def of_q(q):
        return loss(q, *others)

    got = hessian(of_q, x, vectorize=True, outer_jacobian_strategy=strategy)
    assert_close(got, hessian(of_q, x))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "seed": 3}])
def test_batched_gradients_have_gradients(options):
    q, k, v = tensors(requires_grad=True)
    out = cuflash.torch.attention(q, k, v, **options)
    douts = torch.stack([out.detach(), out.detach().square()])
    more = {"create_graph": not options, "retain_graph": True}
    (got,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, **more)
    each = [torch.autograd.grad(out, q, x, **more)[0] for x in douts]
    assert_close(got, torch.stack(each))
    if not options:
        both = (got.square().sum(), torch.stack(each).square().sum())
        assert_close(*(torch.autograd.grad(x, k, **more)[0] for x in both))


def test_gradients_of_lse_alone():
    x, *others = tensors(requires_grad=True)
    _, lse = cuflash.torch.attention(x, *others, return_lse=True)
    dlse = torch.ones(2, *lse.shape, dtype=lse.dtype)
    (got,) = torch.autograd.grad(
        lse, x, dlse, is_grads_batched=True, retain_graph=True
    )
    (each,) = torch.autograd.grad(lse, x, dlse[0])
    assert_equal(got, (each, each))
