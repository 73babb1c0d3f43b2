"""Tensors in the kernels' hands: as NumPy arrays on the same emulator."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]

BOTH = {
    "bias": options(torch.float32)["bias"]["bias"],
    "sink": options(torch.float32)["sink"]["sink"],
}


@pytest.fixture(params=["sm_80", "sm_90a"])
def emulator(request):
    with emulated_torch.active(request.param) as device:
        yield device


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


def test_16_bit_tensors(emulator):
    inputs = tensors(
        torch.bfloat16, head_dim=64, head_dim_v=64, requires_grad=True
    )
    check(inputs, {"causal": True})


def test_options_with_gradients_and_that_of_lse(emulator):
    inputs = tensors(torch.float32, requires_grad=True)
    for x in BOTH.values():
        x.requires_grad_()
    check(inputs, BOTH, dlse=True)


def test_a_sink_without_keys(emulator):
    inputs = tensors(torch.float32, seqlen_k=0, requires_grad=True)
    sink = BOTH["sink"].detach().requires_grad_()
    check(inputs, {"sink": sink}, dlse=True)
    _, lse = cuflash.torch.attention(*inputs, sink=sink, return_lse=True)
    (got,) = torch.autograd.grad(lse.sum(), sink)
    assert torch.equal(got, torch.full((4,), 10.0))  # lse is the sink, 2 x 5


def directions(inputs):
    return [torch.randn_like(x) for x in inputs]


@pytest.mark.parametrize("name", ["none", "bias", "sink"])
def test_tangents(emulator, name):
    inputs, given = tensors(torch.float32), options(torch.float32)[name]
    moved = directions(inputs)
    _, got = torch.func.jvp(
        lambda *x: cuflash.torch.attention(*x, return_lse=True, **given),
        tuple(inputs),
        tuple(moved),
    )
    expected = on_numpy(cuflash.jvp, *inputs, *moved, return_lse=True, **given)
    assert_equal(got, expected[2:])


def test_several_tangents(emulator):
    q, k, v = tensors(torch.float32, head_dim=2)
    moved = torch.randn(3, *q.shape)

    def push(q_dot):
        call = lambda q: cuflash.torch.attention(q, k, v)  # noqa: E731
        return torch.func.jvp(call, (q,), (q_dot,))[1]

    got = torch.func.vmap(push)(moved)
    expected = on_numpy(cuflash.jvp, q, k, v, moved, None, None)
    assert torch.equal(got, expected[1])


def test_second_gradients(emulator):
    inputs = tensors(torch.float32, requires_grad=True)
    out, lse = cuflash.torch.attention(*inputs, **BOTH, return_lse=True)
    dout, dlse = (x.requires_grad_() for x in directions([out, lse]))
    first = torch.autograd.grad(
        (out, lse), inputs, (dout, dlse), create_graph=True
    )
    moved = directions(inputs)
    got = torch.autograd.grad(first, (*inputs, dout, dlse), moved)
    expected = on_numpy(
        cuflash.double_backward,
        *moved, dout, *inputs, out, lse, dlse=dlse, return_ddlse=True, **BOTH,
    )  # fmt: skip
    assert_equal(got, expected)


def test_strides_that_need_copies(emulator):
    q, k, v = tensors(torch.float32, head_dim=16, head_dim_v=12)
    views = [q[..., ::2], k[..., 1::2], v[..., ::3]]
    leaves = [x.detach().requires_grad_() for x in views]
    check(leaves, {})


def test_packed_sequences(emulator):
    inputs, given = packed_tensors(torch.float32, requires_grad=True)
    check(inputs, given)


def test_kvcache(emulator):
    generator = torch.Generator().manual_seed(0)

    def arrays():
        generator.manual_seed(0)
        q, k_new, v_new = torch.randn(3, 2, 1, 4, 8, generator=generator)
        k_cache, v_cache = torch.randn(2, 2, 9, 4, 8, generator=generator)
        return {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "k_new": k_new,
            "v_new": v_new,
            "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32),
        }

    ours, theirs = arrays(), arrays()
    got = cuflash.torch.forward_kvcache(**ours, return_lse=True)
    assert_equal(
        got, on_numpy(cuflash.forward_kvcache, **theirs, return_lse=True)
    )
    assert_equal(ours.values(), theirs.values())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_offsets_of_any_integer_dtype(emulator, dtype):
    """Kernels read a converted copy: the host does not read a device."""
    inputs, given = packed_tensors(torch.float32)
    want = cuflash.torch.attention(*inputs, **given)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given[name] = given[name].to(dtype)
    assert_equal([cuflash.torch.attention(*inputs, **given)], [want])


def test_offsets_are_read_where_asked(emulator, monkeypatch):
    inputs, given = packed_tensors(torch.float32)
    given["cu_seqlens_q"] = torch.tensor([0, 3, 99], dtype=torch.int32)
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with pytest.raises(cuflash.ValueRangeError, match=r"cu_seqlens_q\[2\]"):
        cuflash.torch.attention(*inputs, **given)


def test_a_wrong_shape(emulator):
    q, k, v = tensors(torch.float32)
    with pytest.raises(cuflash.ShapeError, match="k has head_dim 7"):
        cuflash.torch.attention(q, k[..., 1:], v)
