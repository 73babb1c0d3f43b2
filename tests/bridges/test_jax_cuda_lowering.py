"""The CUDA lowering, its kernels run by the emulator: bits of cuflash's own.

In the same order of warps, kernels of the same plans give the same bits.
"""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import (  # noqa: E402
    DIFFERENTIABLE,
    assert_same,
    expected_gradients,
    inputs,
    loss,
    normal,
    options,
    packed,
    split,
)
from jax_machines import emulated  # noqa: E402

import cuflash  # noqa: E402
from cuflash import emulator  # noqa: E402
from cuflash.jax import attention  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

CASES = {
    "float16-sm_80": {},
    "bfloat16-sm_90a": {},
    "float32-sm_80": {},
    "float64-sm_75": {},
}
WHICH = [
    ("float32", "sm_80", "none"),
    ("float16", "sm_80", "causal"),
    ("bfloat16", "sm_90a", "none"),
    ("bfloat16", "sm_90a", "bias"),
    ("bfloat16", "sm_90a", "bias of keys"),
    ("float16", "sm_90a", "sink"),
    ("float16", "sm_80", "dropout"),
    ("float32", "sm_80", "ids"),
]


def on_emulator(arch, function, *arguments):
    """A jitted function's results, by the CUDA lowering."""
    with emulated(arch) as machine:
        results = jax.jit(function)(*arguments)
        jax.block_until_ready(results)
        return results, machine.runs


def case(dtype, name):
    """Arrays with aligned rows, which JAX need not pad, and an option."""
    given = inputs(dtype, head_dim_v=8) | options(dtype)[name]
    arrays, static = split(given)
    wrt = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
    return wrt, {n: x for n, x in arrays.items() if n not in wrt}, static


@pytest.mark.parametrize("dtype, arch, name", WHICH)
def test_the_bits_are_those_of_cuflash(dtype, arch, name):
    wrt, others, static = case(dtype, name)
    if name != "bias of keys":  # whose gradient has no order
        static["deterministic"] = True
    with emulator.active(arch):
        function, of = loss(wrt, others, **static)
        given = {n: np.asarray(x) for n, x in {**wrt, **others}.items()}
        expected = expected_gradients(given, of, static)
    got, runs = on_emulator(arch, jax.grad(function), wrt)
    assert runs == 2  # forward, gradients
    if name == "bias of keys":
        del expected["bias"], expected["q"]
    for each, gradient in expected.items():
        assert_same(got[each], gradient)
