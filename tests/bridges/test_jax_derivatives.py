"""Forward mode and second derivatives of `cuflash.jax.attention`."""

from unittest import mock

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    assert_same,
    float64_if,
    inputs,
    loss,
    normal,
    options,
    packed,
    split,
)
from jax_dense import dense  # noqa: E402

import cuflash  # noqa: E402
from cuflash.api import derivatives as api_derivatives  # noqa: E402
from cuflash.jax import attention  # noqa: E402
from helpers.compare import assert_all, assert_allclose  # noqa: E402

pytestmark = pytest.mark.slow

DTYPES = ["float16", "bfloat16", "float32", "float64"]
# Each option in one dtype, and each dtype with one option.
CASES = [("float32", name) for name in options()] + [
    (dtype, "bias") for dtype in DTYPES if dtype != "float32"
]


def case(dtype, name):
    """Arrays that have derivatives, others, static values, and tangents."""
    given = packed(dtype) if name == "packed" else inputs(dtype)
    arrays, static = split(given | options(dtype).get(name, {}))
    wrt = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
    others = {n: x for n, x in arrays.items() if n not in wrt}
    moved = {
        n: normal(*x.shape, dtype=x.dtype.name, seed=6) for n, x in wrt.items()
    }
    return wrt, others, static, moved


def as_numpy(named):
    return {n: np.asarray(x) for n, x in named.items()}


@pytest.mark.parametrize("dtype, name", [*CASES, ("float32", "packed")])
def test_tangents_are_those_of_jvp(dtype, name):
    with float64_if(dtype):
        wrt, others, static, moved = case(dtype, name)

        def call(wrt):
            return attention(**wrt, **others, **static, return_lse=True)

        got, tangents = jax.jit(lambda *x: jax.jvp(call, *x))((wrt,), (moved,))
        expected = cuflash.jvp(
            **as_numpy(wrt | others),
            **{f"{n}_dot": x for n, x in moved.items()},
            **static,
            return_lse=True,
        )
        plain = call(wrt)
    for x, y in zip((*got, *tangents), (*plain, *expected[2:]), strict=True):
        assert_same(x, y)


def test_a_pushforward_is_a_function():
    wrt, others, static, moved = case("float32", "causal")

    def call(wrt):
        return attention(**wrt, **others, **static)

    out, push = jax.linearize(call, wrt)
    got, out_dot = jax.jvp(call, (wrt,), (moved,))
    assert_same(out, got)
    assert_same(push(moved), out_dot)


@pytest.mark.parametrize("dtype, name", [*CASES, ("float32", "packed")])
def test_second_gradients_are_those_of_double_backward(dtype, name):
    with float64_if(dtype):
        wrt, others, static, moved = case(dtype, name)
        function, (out, lse, dout, dlse) = loss(wrt, others, **static)

        def penalty(wrt):
            gradients = jax.grad(function)(wrt)
            return sum((gradients[n] * moved[n]).sum() for n in moved)

        got = jax.jit(jax.grad(penalty))(wrt)
    wanted = {f"return_d2{n}": n in wrt for n in ("bias", "sink")}
    expected = cuflash.double_backward(
        **{f"dd{n}": x for n, x in moved.items()},
        dout=dout, out=out, lse=lse, dlse=dlse,
        **as_numpy(wrt | others), **static, **wanted,
    )  # fmt: skip
    names = ("q", "k", "v", "ddout", *(n for n in wrt if n not in "qkv"))
    named = dict(zip(names, expected, strict=True))
    for n, x in got.items():
        assert_same(x, named[n])


SIZES = {
    "batch": 1,
    "seqlen_q": 2,
    "seqlen_k": 3,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "head_dim": 2,
    "head_dim_v": 2,
}


def total(function):
    def scalar(*given):
        out = function(*given)
        weights = np.linspace(-1, 1, out.size).reshape(out.shape)
        return (out**2 * weights).sum()

    return scalar


def gradient_of_tangent(function, wrt):
    def squares(*given):
        moved = tuple(map(jnp.cos, given))
        return (jax.jvp(function, given, moved)[1] ** 2).sum()

    return jax.grad(squares, wrt)


# A transform of a function and of the positions of its arguments.
TRANSFORMS = {
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "forward over reverse": lambda f, n: jax.hessian(total(f), n),
    "reverse over reverse": lambda f, n: jax.jacrev(jax.grad(total(f), n), n),
    "reverse over jacfwd": lambda f, n: jax.jacrev(jax.jacfwd(total(f), n), n),
    "gradient of a tangent": gradient_of_tangent,
    "checkpoint": lambda f, n: jax.hessian(jax.checkpoint(total(f)), n),
}


def small(name):
    """cuflash's attention, dense attention, and the arrays of both."""
    given = inputs("float64", **SIZES)
    given |= {
        "bias": {"bias": normal(2, 3, dtype="float64")},
        "sink": {"sink": normal(2, dtype="float64")},
        "none": {},
    }[name]
    names = tuple(given)

    def named(function):
        return lambda *x: function(**dict(zip(names, x, strict=True)))

    return named(attention), named(dense), tuple(given.values())


def assert_close(got, expected):
    """Some hundred operations on numbers of size 10: 500 * 10 * 2^-53."""
    jax.tree.map(
        lambda x, y: assert_allclose(x, y, "result", atol=1e-12),
        got,
        expected,
    )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["bias", "sink"])
def test_transforms(transform, name):
    with jax.enable_x64(True):
        ours, theirs, given = small(name)
        wrt = tuple(range(len(given)))
        results = [
            jax.jit(TRANSFORMS[transform](function, wrt))(*given)
            for function in (ours, theirs)
        ]
    assert_close(*results)


# XLA compiles each for a second; a mapped sink runs one by one, for longer.
QUICK = ["jacfwd", "forward over reverse", "gradient of a tangent"]


@pytest.mark.parametrize(
    ("name", "moving", "transform"),
    [("bias", "all", each) for each in TRANSFORMS]
    + [
        (*moved, each)
        for moved in [("bias", "q"), ("bias", "last"), ("none", "last"),
                      ("sink", "all"), ("sink", "last")]
        for each in QUICK
    ],
)  # fmt: skip
def test_vmap(transform, moving, name):
    with jax.enable_x64(True):
        ours, theirs, given = small(name)
        wrt = tuple(range(len(given)))
        moves = {"all": wrt, "q": wrt[:1], "last": wrt[-1:]}[moving]
        axes = tuple(min(1, x.ndim) if i in moves else None
                     for i, x in enumerate(given))  # fmt: skip
        mapped = [
            x if axis is None else np.stack([x, np.sin(x)], axis)
            for x, axis in zip(given, axes, strict=True)
        ]
        results = [
            jax.jit(jax.vmap(TRANSFORMS[transform](function, wrt), axes))(
                *mapped
            )
            for function in (ours, theirs)
        ]
    assert_close(*results)


def test_nested_maps_of_tangents():
    """One tangent moves along both axes, each other along one of them."""
    q, k, v = given = tuple(inputs(**SIZES).values())
    moved = normal(*q.shape, 2, 3), normal(*k.shape, 2), normal(3, *v.shape)

    def call(*moved):
        return jax.jvp(attention, given, moved)[1]

    inner = jax.vmap(call, (-1, None, 0))
    got = jax.vmap(inner, (-2, -1, None))(*moved)
    for i, j in np.ndindex(2, 3):
        one = moved[0][..., i, j], moved[1][..., i], moved[2][j]
        assert_same(got[i, j], call(*one))


def calls_of(name, monkeypatch):
    counted = mock.Mock(side_effect=getattr(api_derivatives, name))
    monkeypatch.setattr(api_derivatives, name, counted)
    return counted


def test_jacfwd_is_one_call_of_many_directions(monkeypatch):
    calls = calls_of("jvp", monkeypatch)
    given = inputs(**SIZES)
    jacobian = jax.jacfwd(lambda k: attention(given["q"], k, given["v"]))
    jax.block_until_ready(jax.jit(jacobian)(given["k"]))
    (call,) = calls.mock_calls
    k = given["k"]
    assert call.kwargs["k_dot"].shape == (k.size, *k.shape)
    assert call.kwargs["k"].shape == k.shape


def test_the_jacobians_of_a_batch_are_one_call(monkeypatch):
    calls = calls_of("jvp", monkeypatch)
    given = inputs(**SIZES)
    several = {n: np.stack([x, x, x]) for n, x in given.items()}
    jacobian = jax.vmap(jax.jacfwd(lambda given: attention(**given)))
    jax.block_until_ready(jax.jit(jacobian)(several))
    (call,) = calls.mock_calls
    num = sum(x.size for x in given.values())
    assert call.kwargs["q_dot"].shape == (num, 3, *given["q"].shape[1:])


def test_a_gradient_of_a_gradient_is_one_call(monkeypatch):
    calls = calls_of("double_backward", monkeypatch)
    other = calls_of("jvp", monkeypatch)
    given = inputs(**SIZES)

    def gradient(q):
        return jax.grad(lambda q: (attention(**{**given, "q": q}) ** 2).sum())(
            q
        )

    jax.block_until_ready(
        jax.jit(jax.grad(lambda q: (gradient(q) ** 2).sum()))(given["q"])
    )
    assert (calls.call_count, other.call_count) == (1, 0)


def test_scan_of_second_gradients():
    given = inputs(**SIZES)

    def scanned(q, length=2):
        def layer(x, _):
            return x + attention(x, given["k"], given["v"]), None

        return (jax.lax.scan(layer, q, None, length=length)[0] ** 2).sum()

    def unrolled(q):
        for _ in range(2):
            q = q + attention(q, given["k"], given["v"])
        return (q**2).sum()

    got, expected = (
        jax.jit(jax.grad(lambda q, f=f: (jax.grad(f)(q) ** 2).sum()))(
            given["q"]
        )
        for f in (scanned, unrolled)
    )
    # XLA may add in another order: 2^-24 for each of some 30 sums.
    assert_allclose(got, expected, "got", rtol=30 * 2.0**-24)


def test_rows_that_see_no_key():
    given = inputs("float32", **SIZES | {"seqlen_k": 1})

    def call(q):
        return attention(q, given["k"], given["v"], causal=True)

    q = given["q"]
    _, out_dot = jax.jvp(call, (q,), (q,))
    second = jax.hessian(lambda q: call(q).sum())(q)
    assert_all(np.asarray(out_dot)[:, 0], 0, "out_dot")
    assert_all(np.asarray(second)[:, 0], 0, "np.asarray(second)[:, 0]")
