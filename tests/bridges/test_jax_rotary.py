"""`cuflash.jax.apply_rotary`: values, derivatives, transforms."""

from types import SimpleNamespace

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_data import float64_if, normal, on_cpu  # noqa: E402

import cuflash  # noqa: E402
from cuflash.errors import ShapeError, UnsupportedError  # noqa: E402
from cuflash.jax import apply_rotary, checks  # noqa: E402
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_finite,
)
from helpers.dtypes import PRECISION  # noqa: E402

pytestmark = pytest.mark.slow

POSITIONS = {
    "none": None,
    "of tokens": np.array([4, 0, 8, 2, 1], np.int32),
    "of each": np.arange(10, dtype=np.int32).reshape(2, 5) % 9,
    "of sequences": np.array([[3], [7]], np.int32),
}


def call(dtype="float32", shape=(2, 5, 3, 8), pairs=3):
    """Return x, and cos and sin of nine positions, on the CPU."""
    angles = normal(9, pairs, dtype="float64")
    tables = (t.astype(normal(1, dtype=dtype).dtype)
              for t in (np.cos(angles), np.sin(angles)))  # fmt: skip
    return [on_cpu(x) for x in (normal(*shape, dtype=dtype), *tables)]


@pytest.mark.parametrize(
    "name, interleaved, inverse, dtype",
    [
        ("none", False, False, "float32"),
        ("of tokens", False, True, "bfloat16"),
        ("of each", True, False, "float64"),
        ("of sequences", True, True, "bfloat16"),
    ],
)
def test_values_are_those_of_numpy(name, interleaved, inverse, dtype):
    given = {
        "interleaved": interleaved,
        "inverse": inverse,
        "positions": POSITIONS[name],
    }
    with float64_if(dtype):
        arguments = call(dtype)
        got = np.asarray(apply_rotary(*arguments, **given))
    expected = cuflash.apply_rotary(*map(np.asarray, arguments), **given)
    assert got.dtype == expected.dtype
    got, expected = (x.astype(np.float64) for x in (got, expected))
    # Two products and a sum of pairs of size up to 4, then a rounding.
    unit, _, e = PRECISION[dtype]
    assert_allclose(got, expected, "got", rtol=2 * unit, atol=3 * 8 * e)


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out(rank):
    x, *tables = call()
    index = {3: 0, 2: (0, slice(None), 0)}[rank]
    given = {"positions": POSITIONS["of tokens"]}
    whole = apply_rotary(x, *tables, **given)[index]
    got = apply_rotary(x[index], *tables, **given)
    # XLA may fuse a product and a sum in one of the two.
    assert_allclose(got, whole, "got", atol=8 * 2.0**-23)


def test_derivatives():
    """The transpose is the inverse; linear in x, and in the tables."""

    @jax.jit
    def run(x, cos, sin):
        out, pull = jax.vjp(apply_rotary, x, cos, sin)
        _, tangent = jax.jvp(apply_rotary, (x, cos, sin), (x, -cos, -sin))
        back = apply_rotary(out, cos, sin, inverse=True)
        return out, tangent, back, *pull(out)

    given = call(pairs=4)
    out, tangent, back, dx, dcos, dsin = map(np.asarray, run(*given))
    x, cos, sin = map(np.asarray, given)
    rounding = 2 * 3 * 8 * 2.0**-23  # as above, there and back
    assert_allclose(tangent, 0, "tangent", rtol=1e-07, atol=rounding)
    assert_allclose(dx, back, "dx", atol=rounding)
    assert_allclose(back, x, "back", atol=rounding)
    # <out, R x> both ways; 6 numbers are summed for each table's element.
    got = (dcos * cos + dsin * sin).sum(dtype=np.float64)
    square = (out.astype(np.float64) ** 2).sum()
    assert_allclose(got, square, "got", rtol=10 * 2.0**-23)


def test_jit_and_vmap_over_positions():
    x, cos, sin = call()
    many = jnp.stack([POSITIONS["of tokens"], jnp.arange(5)])

    def function(positions):
        return apply_rotary(x, cos, sin, positions=positions)

    got = jax.jit(jax.vmap(function))(many)
    expected = jnp.stack([*map(function, many)])
    assert_allclose(got, expected, "got", atol=8 * 2.0**-23)


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32"])
def test_positions_outside_the_tables(kind):
    """An error where the host has them, else NaN as from the kernel."""
    x, cos, sin = call()
    bad = np.array([0, 1, 100, 9, 8], kind)
    for positions in (bad.astype("int32"), on_cpu(bad.astype("int32"))):
        with pytest.raises(ValueError, match=r"positions\[2\] is 100"):
            apply_rotary(x, cos, sin, positions=positions)
    got = np.asarray(jax.jit(apply_rotary)(x, cos, sin, positions=bad))
    assert_all(got[:, 2:4, :, :6], np.nan, "got[:, 2:4, :, :6]")
    assert_arrays_equal(got[..., 6:], x[..., 6:], "got[..., 6:]")
    assert_finite(got[:, [0, 1, 4]], "got[:, [0, 1, 4]]")


def test_bad_arguments():
    x, cos, sin = call()
    with pytest.raises(ShapeError, match="cos has 3 rows, expected at least"):
        jax.jit(apply_rotary)(x, cos[:3], sin[:3])
    with pytest.raises(UnsupportedError, match="inverse is a JAX tracer"):
        jax.jit(apply_rotary)(x, cos, sin, inverse=True)


def test_arrays_on_a_gpu_are_read_only_when_asked(monkeypatch):
    class OnGpu(SimpleNamespace):
        is_fully_addressable = True

        def devices(self):
            return [SimpleNamespace(platform="gpu")]

        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    assert checks.on_host(OnGpu()) is None
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    assert_arrays_equal(
        checks.on_host(OnGpu()), np.arange(3), "checks.on_host(OnGpu())"
    )
