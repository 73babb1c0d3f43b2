"""`cuflash.jax.attention` on the CPU: the numbers of cuflash.forward."""

import doctest
import inspect
import sys

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    DTYPES,
    assert_same,
    expected_gradients,
    float64_if,
    inputs,
    loss,
    normal,
    on_cpu,
    options,
    packed,
    split,
)

import cuflash  # noqa: E402
from cuflash.jax import attention  # noqa: E402

pytestmark = pytest.mark.slow

by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_option = pytest.mark.parametrize("name", options())


@by_dtype
@by_option
def test_results_are_those_of_forward(dtype, name):
    given = inputs(dtype) | options(dtype)[name]
    expected = cuflash.forward(**given, return_lse=True)
    with float64_if(dtype):
        arrays, static = split(given)

        def call(arrays):
            return attention(**arrays, **static, return_lse=True)

        for x, y in zip(jax.jit(call)(arrays), expected, strict=True):
            assert_same(x, y)


@by_dtype
@by_option
def test_gradients_are_those_of_backward(dtype, name):
    given = inputs(dtype) | options(dtype)[name]
    with float64_if(dtype):
        arrays, static = split(given)
        wrt = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        others = {n: x for n, x in arrays.items() if n not in wrt}
        function, of = loss(wrt, others, **static)
        got = jax.jit(jax.grad(function))(wrt)
        given = {n: x for n, x in given.items() if n not in static}
        expected = expected_gradients(given, of, static)
        for each in wrt:
            assert_same(got[each], expected[each])


def test_without_jit():
    given = inputs() | options()["window"]
    arrays, static = split(given)
    got = attention(**arrays, **static)
    assert_same(got, cuflash.forward(**given))


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out_of_q_are_left_out_of_results(rank):
    index = (0,) if rank == 3 else (0, slice(None), 0)
    given = {n: x[index] for n, x in inputs().items()}
    given["bias"] = normal(5, 7)
    expected = cuflash.forward(**given, return_lse=True)
    got = attention(**split(given)[0], return_lse=True)
    for x, y in zip(got, expected, strict=True):
        assert_same(x, y)


def test_segment_ids_without_batch():
    given = {n: x[0] for n, x in inputs().items()}
    given |= options()["ids of all"]
    assert_same(attention(**split(given)[0]), cuflash.forward(**given))


@by_dtype
def test_packed_sequences(dtype):
    given = packed(dtype)
    expected = cuflash.forward(**given, causal=True)
    with float64_if(dtype):
        got = attention(**split(given)[0], causal=True)
        assert_same(got, expected)


def test_gradients_of_packed_sequences():
    given = packed()
    arrays, _ = split(given)
    wrt = {n: arrays.pop(n) for n in ("q", "k", "v")}
    function, of = loss(wrt, arrays)
    got = jax.grad(function)(wrt)
    for name, expected in expected_gradients(given, of, {}).items():
        assert_same(got[name], expected)


@pytest.mark.parametrize("seed", [np.uint32(3), np.int32(-3), np.uint8(3)])
def test_a_traced_seed(seed):
    given = inputs()
    call = jax.jit(lambda seed: attention(**given, dropout=0.5, seed=seed))
    number = int(seed) % 2**64
    expected = cuflash.forward(**given, dropout=0.5, seed=number)
    assert_same(call(on_cpu(seed)), expected)


@pytest.mark.parametrize("axis", ["seqlen_q", "seqlen_k", "batch"])
def test_nothing_to_attend(axis):
    given = inputs(**{axis: 0})
    wrt, _ = split(given)
    assert_same(attention(**wrt), cuflash.forward(**given))
    function, of = loss(wrt, {})
    got = jax.grad(function)(wrt)
    for name, expected in expected_gradients(given, of, {}).items():
        assert_same(got[name], expected)


def test_lse_alone_is_differentiable():
    wrt, _ = split(inputs())

    def total(wrt):
        return attention(**wrt, return_lse=True)[1].sum()

    got = jax.grad(total)(wrt)
    out, lse = cuflash.forward(**inputs(), return_lse=True)
    expected = cuflash.backward(
        np.zeros_like(out), *inputs().values(), out, lse,
        dlse=np.ones_like(lse),
    )  # fmt: skip
    for name, gradient in zip("qkv", expected, strict=True):
        assert_same(got[name], gradient)


def test_numpy_arrays_are_taken():
    got = attention(**inputs())
    assert isinstance(got, jax.Array)


def test_arguments_are_those_of_forward():
    names = [*inspect.signature(cuflash.forward).parameters]
    own = [*inspect.signature(attention).parameters]
    ours = {"out", "return_max_score"}
    assert {*own} == {*names} - ours | {"deterministic"}
    defaults = inspect.signature(cuflash.forward).parameters
    for name, each in inspect.signature(attention).parameters.items():
        if name != "deterministic":
            assert each.default == defaults[name].default


@pytest.mark.parametrize("name", ["", ".attention"])
def test_examples(name):
    module = sys.modules[f"cuflash.jax{name}"]
    failed, count = doctest.testmod(module)
    assert count and not failed
