"""Second derivatives and forward mode of `cuflash.torch.attention`."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402
from torch_data import (  # noqa: E402
    assert_equal,
    on_numpy,
    options,
    packed_tensors,
    tensors,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.api import attention as api_attention  # noqa: E402
from cuflash.torch import request_derivatives  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
]

# Finite differences call attention twice for each number.
SMALL = {
    "batch": 1,
    "seqlen_q": 2,
    "seqlen_k": 3,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "head_dim": 2,
    "head_dim_v": 1,
}
by_option = pytest.mark.parametrize("name", options())


def small_options(name):
    """Return an option for `SMALL`: the first rows, keys and heads."""
    given = {}
    for each, x in options()[name].items():
        if isinstance(x, torch.Tensor):
            sizes = {5: 2, 7: 3, 4: 2, 2: 1}
            for axis, size in enumerate(x.shape):
                x = x.narrow(axis, 0, sizes.get(size, size))
        given[each] = x
    return given


def differentiable(name):
    """Return attention as a function, and what it is differentiated in."""
    given = small_options(name)
    wrt = {x: given.pop(x) for x in ("bias", "sink") if x in given}
    # Finite differences of an lse of -inf are NaN.
    return_lse = name not in ("mask", "segment_ids", "window")

    def call(q, k, v, *others):
        named = dict(zip(wrt, others, strict=True))
        return cuflash.torch.attention(
            q, k, v, return_lse=return_lse, **given, **named
        )

    leaves = [x.clone().requires_grad_() for x in wrt.values()]
    return call, (*tensors(requires_grad=True, **SMALL), *leaves)


@by_option
def test_finite_differences_of_out_and_lse(name):
    assert gradcheck(*differentiable(name), check_forward_ad=True)


@by_option
def test_finite_differences_of_gradients(name):
    """Reverse over reverse, and forward over reverse."""
    assert gradgradcheck(*differentiable(name), check_fwd_over_rev=True)


def directions(inputs):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(
            x.dtype
        )
        for x in inputs
    ]


def counted(function, calls, name=None):
    def call(*given, **named):
        calls.append(name or function.__name__)
        return function(*given, **named)

    return call


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@by_option
def test_tangents_are_those_of_jvp(dtype, name):
    inputs, given = tensors(dtype), options(dtype)[name]
    moved = directions(inputs)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, moved)
        results = cuflash.torch.attention(*duals, return_lse=True, **given)
        got = [forward_ad.unpack_dual(x) for x in results]
    expected = on_numpy(cuflash.jvp, *inputs, *moved, return_lse=True, **given)
    plain = cuflash.torch.attention(*inputs, return_lse=True, **given)
    assert_equal([x.primal for x in got], plain)
    assert_equal([x.tangent for x in got], expected[2:])


def second_gradients(inputs, given, moved):
    """Return the gradients of <dq, moved[0]> + ..., and what to expect."""
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    dout, dlse = (x.requires_grad_() for x in directions([out, lse]))
    first = torch.autograd.grad(
        (out, lse), inputs, (dout, dlse), create_graph=True
    )
    total = sum((x * y).sum() for x, y in zip(first, moved, strict=True))
    got = torch.autograd.grad(total, (*inputs, dout, dlse))
    return got, on_numpy(
        cuflash.double_backward,
        *moved, dout, *inputs, out, lse, dlse=dlse, return_ddlse=True, **given,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@by_option
def test_second_gradients_are_those_of_double_backward(dtype, name):
    inputs, given = tensors(dtype, requires_grad=True), options(dtype)[name]
    assert_equal(*second_gradients(inputs, given, directions(inputs)))


def test_packed_sequences():
    inputs, given = packed_tensors(requires_grad=True)
    moved = directions(inputs)
    assert_equal(*second_gradients(inputs, given, moved))
    _, tangents = torch.func.jvp(
        lambda *x: cuflash.torch.attention(*x, return_lse=True, **given),
        tuple(x.detach() for x in inputs),
        tuple(moved),
    )
    expected = on_numpy(cuflash.jvp, *inputs, *moved, return_lse=True, **given)
    assert_equal(tangents, expected[2:])


def test_each_order_runs_one_call(monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(
            api_attention, name, counted(getattr(api_attention, name), calls)
        )
    of_cpu = request_derivatives.ON_CPU
    for name, function in of_cpu.items():
        monkeypatch.setitem(of_cpu, name, counted(function, calls, name))
    inputs = tensors(requires_grad=True)
    out = cuflash.torch.attention(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(x.sum() for x in first), inputs)
    assert calls == ["forward", "backward", "double_backward"]


def test_gradients_of_some_inputs():
    q, k, v = tensors()
    out = cuflash.torch.attention(q, k.requires_grad_(), v)
    (dk,) = torch.autograd.grad((out**2).sum(), k, create_graph=True)
    (got,) = torch.autograd.grad(dk.sum(), k)
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cuflash.torch.attention(*whole)
    (dk,) = torch.autograd.grad((out**2).sum(), whole[1], create_graph=True)
    assert_arrays_equal(got, torch.autograd.grad(dk.sum(), whole[1])[0], "got")


def test_third_derivatives_are_refused():
    inputs = tensors(requires_grad=True)
    out = cuflash.torch.attention(*inputs)
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    (d2q,) = torch.autograd.grad(dq.sum(), inputs[:1], create_graph=True)
    with pytest.raises(cuflash.UnsupportedError, match="third derivatives"):
        d2q.sum().backward()


def test_an_option_with_a_tangent_is_refused():
    inputs, given = tensors(), options()["alibi_slopes"]
    (slopes,) = given.values()
    words = "alibi_slopes is differentiated, expected q, k, v, bias or sink"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(slopes, slopes)
        with pytest.raises(cuflash.UnsupportedError, match=words):
            cuflash.torch.attention(*inputs, alibi_slopes=dual)
        cuflash.torch.attention(*inputs, **given)


def test_a_tangent_of_another_dtype():
    q, k, v = tensors()
    words = "q_dot has dtype float32, expected float64 as q"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q.float())
        with pytest.raises(cuflash.DTypeError, match=words):
            cuflash.torch.attention(dual, k, v)


def test_tangents_through_autocast():
    inputs = tensors(torch.float32)
    moved = tuple(directions(inputs))

    def call(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cuflash.torch.attention(*inputs)

    out, out_dot = torch.func.jvp(call, tuple(inputs), moved)
    low = [[y.bfloat16() for y in x] for x in (inputs, moved)]
    assert_equal((out, out_dot), on_numpy(cuflash.jvp, *low[0], *low[1]))


def test_caches_have_no_tangents():
    q, k, v = tensors()
    caches = {"k_cache": k, "v_cache": v, "cache_seqlens": 7}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(cuflash.UnsupportedError, match="q has a tangent"):
            cuflash.torch.forward_kvcache(dual, **caches)
