"""Readouts on CUDA's path of `cuflash.jax`, emulated: NumPy arrays' bits."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
from jax_data import assert_same, inputs  # noqa: E402
from jax_machines import STREAM, by_the_driver  # noqa: E402

import cuflash  # noqa: E402
import cuflash.jax  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

ROWS = np.arange(4, dtype="float32")[:, None]
CHOICES = {
    "weights": {"queries": [-1, 2], "keys": [4, 0], "heads": [1]},
    "weight_sums": {"queries": np.array([[-1, 2], [0, 0]])},
    "entropy": {},
}


@pytest.mark.parametrize("name", CHOICES)
def test_results_and_gradients(name):
    q, k, v = inputs().values()
    given = {"causal": True, **CHOICES[name]}

    def call(*arrays):
        return getattr(cuflash.jax, name)(*arrays, **given)

    with by_the_driver("sm_80") as device:
        _, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
        expected = getattr(cuflash, name)(q, k, lse, **given)
        dresult = np.cos(np.arange(expected.size, dtype="float32"))
        dresult = dresult.reshape(expected.shape)
        backward = getattr(cuflash, f"{name}_backward")
        gradients = backward(dresult, q, k, lse, **given)
        device.launches.clear()
        got, vjp = jax.vjp(jax.jit(call), *map(jnp.asarray, (q, k, lse)))
        pulled = vjp(jnp.asarray(dresult))
        jax.block_until_ready(pulled)
        entries = {entry for entry, _ in device.launches}
    assert {f"{name}_fma", "readout_gradients_fma"} <= entries
    assert {stream for _, stream in device.launches} == {STREAM}
    for x, y in zip((got, *pulled), (expected, *gradients), strict=True):
        assert_same(x, y)


def test_row_weights():
    """Their gradients are summed by JAX: kernels know the shape of lse."""
    q, k, v = inputs().values()
    with by_the_driver("sm_80"):
        _, lse = cuflash.forward(q, k, v, return_lse=True)
        sums = cuflash.weight_sums(q, k, lse, row_weights=ROWS)
        *_, expected = cuflash.weight_sums_backward(
            2 * sums, q, k, lse, row_weights=ROWS, return_drow_weights=True
        )

        def loss(rows):
            sums = cuflash.jax.weight_sums(q, k, lse, row_weights=rows)
            return (sums**2).sum()

        got = jax.grad(loss)(jnp.asarray(ROWS))
        jax.block_until_ready(got)
    # Sums of 10 rows in another order; no term is negative.
    assert got.shape == expected.shape
    bound = 10 * 2.0**-23 * abs(expected).max()
    assert abs(np.asarray(got) - expected).max() <= bound


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_arrays_that_a_score_reads(name):
    q, k, v = inputs().values()
    table = np.cos(np.arange(20, dtype="float32"))
    given = {"score_mod": lambda s, b, h, i, j, *, t: s + t[i - j + 9] * s}
    given |= CHOICES[name]

    def call(t):
        return getattr(cuflash.jax, name)(
            q, k, lse, mod_arrays={"t": t}, deterministic=True, **given
        )

    with by_the_driver("sm_80"):
        _, lse = cuflash.forward(q, k, v, return_lse=True)
        d = np.asarray(call(table))
        *_, expected = getattr(cuflash, f"{name}_backward")(
            d, q, k, lse, mod_arrays={"t": table}, deterministic=True,
            return_dmod=("t",), **given,
        )  # fmt: skip
        got = jax.grad(lambda t: (call(t) ** 2).sum() / 2)(jnp.asarray(table))
        jax.block_until_ready(got)
    assert_same(got, expected["t"])


def test_weights_in_a_dtype_that_is_converted():
    """On sm_75, which computes with bfloat16 as float32."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs().values())
    lse = cuflash.jax.attention(q, k, v, return_lse=True)[1]

    def call(q):
        return cuflash.jax.weights(q, k, lse, dtype=jnp.bfloat16)

    expected = call(q)
    with by_the_driver("sm_75"):
        got, vjp = jax.vjp(call, q)
        (dq,) = jax.block_until_ready(vjp(got))
    assert (got.dtype, dq.dtype) == (jnp.bfloat16, jnp.bfloat16)
    # Weights are at most 1, and each is rounded once to 8 bits.
    off = abs(np.float32(got) - np.float32(expected))
    assert off.max() <= 2.0**-8
