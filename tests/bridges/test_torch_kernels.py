"""Calls that are more than launches, on an emulated device."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import (  # noqa: E402
    assert_equal,
    expected_gradients,
    on_numpy,
    options,
    packed_tensors,
    tensors,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]


@pytest.fixture(autouse=True)
def device():
    with emulated_torch.active("sm_80") as device:
        yield device
        assert device.launches


def check(inputs, given, dlse=False):
    """Compare out, lse and gradients with those of NumPy arrays."""
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    assert_equal(
        (out, lse),
        on_numpy(cuflash.forward, *inputs, return_lse=True, **given),
    )
    dout, weights = torch.randn_like(out), torch.randn_like(lse)
    wanted = [given[x] for x in ("bias", "sink") if x in given]
    got = torch.autograd.grad(
        (out, lse)[: 1 + dlse],
        [*inputs, *wanted],
        (dout, weights)[: 1 + dlse],
    )
    douts = (dout, weights if dlse else None)
    assert_equal(got, expected_gradients(douts, inputs, given))


def test_a_sink_without_keys():
    inputs = tensors(torch.float32, seqlen_k=0, requires_grad=True)
    sink = options(torch.float32)["sink"]["sink"].requires_grad_()
    check(inputs, {"sink": sink}, dlse=True)
    _, lse = cuflash.torch.attention(*inputs, sink=sink, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), sink)
    # lse is the sink, 2 x 5
    assert_arrays_equal(got, torch.full((4,), 10.0), "got")


def test_several_tangents():
    q, k, v = tensors(torch.float32, head_dim=2)
    moved = torch.randn(3, *q.shape)

    def push(q_dot):
        call = lambda q: cuflash.torch.attention(q, k, v)  # noqa: E731
        return torch.func.jvp(call, (q,), (q_dot,))[1]

    got = torch.func.vmap(push)(moved)
    expected = on_numpy(cuflash.jvp, q, k, v, moved, None, None)
    assert_arrays_equal(got, expected[1], "got")


def test_strides_that_need_copies():
    q, k, v = tensors(torch.float32, head_dim=16, head_dim_v=12)
    views = [q[..., ::2], k[..., 1::2], v[..., ::3]]
    leaves = [x.detach().requires_grad_() for x in views]
    check(leaves, {})


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_offsets_of_any_integer_dtype(dtype):
    """Kernels read a converted copy: the host does not read a device."""
    inputs, given = packed_tensors(torch.float32)
    want = cuflash.torch.attention(*inputs, **given)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given[name] = given[name].to(dtype)
    assert_equal([cuflash.torch.attention(*inputs, **given)], [want])


def test_a_wrong_shape():
    q, k, v = tensors(torch.float32)
    cuflash.torch.attention(q, k, v)
    with pytest.raises(cuflash.ShapeError, match="k has head_dim 7"):
        cuflash.torch.attention(q, k[..., 1:], v)
