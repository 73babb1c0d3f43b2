"""Tensors of ranks that share a sequence."""

import pytest

torch = pytest.importorskip("torch")

from torch_data import negated  # noqa: E402

import cuflash.torch  # noqa: E402
from cuflash import distributed  # noqa: E402
from cuflash.torch.dtypes import from_numpy, to_numpy  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

SIZE = 2


def whole(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 16, heads, 8) for heads in (4, 2, 2)]
    return [
        torch.randn(x, generator=generator, dtype=torch.float64).to(dtype)
        for x in shapes
    ]


def on_ranks(loss, dtype=torch.float64):
    """out and the gradients of q, k and v on ranks that are threads."""

    def of_rank(group):
        parts = [
            from_numpy(distributed.shard(to_numpy(x), group.rank, SIZE))
            for x in whole(dtype)
        ]
        parts = [x.requires_grad_() for x in parts]
        out, lse = cuflash.torch.distributed_attention(
            *parts, group=group, causal=True, return_lse=True
        )
        return out, *torch.autograd.grad(loss(out, lse), parts)

    each = distributed.run_threads(SIZE, of_rank)
    return [
        from_numpy(distributed.unshard([to_numpy(x[i]) for x in each]))
        for i in range(4)
    ]


def alone(loss, dtype=torch.float64):
    parts = [x.requires_grad_() for x in whole(dtype)]
    out, lse = cuflash.torch.attention(*parts, causal=True, return_lse=True)
    return out, *torch.autograd.grad(loss(out, lse), parts)


def assert_same(got, want, dtype=torch.float64):
    # A few hundred roundings of values of about 1, and of gradients of 4.
    bound = 1000 * torch.finfo(dtype).eps
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, lse: (out**2).sum(),
        lambda out, lse: (out * 3).sum() + (lse**2).sum(),
        lambda out, lse: (lse**2).sum(),
    ],
)
def test_gradients_are_those_of_the_whole(loss):
    assert_same(on_ranks(loss), alone(loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    def loss(out, lse):
        return out.float().sum()

    got, want = on_ranks(loss, dtype), alone(loss, dtype)
    assert [x.dtype for x in got] == [dtype] * 4
    # bfloat16: partial results are rounded, of up to 4, to 2^-9 of it.
    bound = 1e-4 if dtype is torch.float32 else 3 * 4 * 2.0**-8
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=bound)


def test_no_second_derivatives():
    def of_rank(group):
        q, k, v = (x[:, ::SIZE].requires_grad_() for x in whole())
        out = cuflash.torch.distributed_attention(q, k, v, group=group)
        with pytest.raises(cuflash.UnsupportedError, match="econd deriv"):
            torch.autograd.grad(out.sum(), q, create_graph=True)

    distributed.run_threads(SIZE, of_rank)


def test_an_array_that_is_no_tensor():
    q, k, v = whole()
    with pytest.raises(cuflash.DTypeError, match="expected a torch.Tensor"):
        cuflash.torch.distributed_attention(q.numpy(), k, v, group=None)


def test_views_that_negate():
    def of_rank(group):
        q, k, v = whole()
        plain = attention(q, k, v, group)
        return plain, attention(negated(q), k, negated(v), group)

    def attention(q, k, v, group):
        return cuflash.torch.distributed_attention(q, k, v, group=group)

    for plain, got in distributed.run_threads(SIZE, of_rank):
        assert_arrays_equal(got, plain, "got")
