"""`cuflash.jax.merge_states`: values, derivatives, transforms."""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_data import assert_same, float64_if, inputs, normal, on_cpu  # noqa: E402

import cuflash  # noqa: E402
from cuflash.errors import DTypeError, ShapeError  # noqa: E402
from cuflash.jax import attention, merge_states  # noqa: E402
from cuflash.reference.tile_state import merge_vjp  # noqa: E402
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_allclose,
    assert_at_most,
    assert_finite,
)
from helpers.dtypes import DTYPES, PRECISION, lse_dtype  # noqa: E402

pytestmark = pytest.mark.slow


def states(parts, dtype="float32", *, shape=(2, 5, 3, 4), blind=0.3):
    """Return out_a, lse_a, out_b, ...; some rows see no key.

    The out of such a row is NaN: it must not matter.
    """
    batch, seqlen, heads, _ = shape
    sums, given = lse_dtype(DTYPES[dtype]).name, []
    rng = np.random.default_rng(0)
    for seed in range(parts):
        out = normal(*shape, dtype=dtype, seed=seed)
        lse = normal(batch, heads, seqlen, dtype=sums, seed=seed)
        hidden = rng.random(lse.shape) < blind
        lse[hidden] = -np.inf
        out[hidden.swapaxes(1, 2)] = np.nan
        given += [on_cpu(out), on_cpu(lse)]
    return given


def assert_close(got, expected):
    """Within what sums of three parts, of size 5, round.

    Each weight and product errs by some 20 e, relative to numbers of size 5;
    gradients are sums of 40.
    """
    for x, y in zip(got, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        unit, _, e = PRECISION[x.dtype.name]
        x, y = (z.astype(np.float64) for z in (x, y))
        size = 1 + np.abs(y[np.isfinite(y)]).max()
        atol = size * (60 * e + 2 * unit)
        assert_allclose(x, y, "x", atol=atol)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_values_are_those_of_numpy(parts, dtype):
    with float64_if(dtype):
        given = states(parts, dtype)
        got = merge_states(*given)
    assert_close(got, cuflash.merge_states(*map(np.asarray, given)))


@pytest.mark.parametrize("rank", [2, 3])
def test_axes_left_out(rank):
    index = {3: 0, 2: (0, slice(None), 0)}[rank]
    of_lse = {3: 0, 2: (0, 0)}[rank]
    given = states(2)
    part = [x[of_lse if i % 2 else index] for i, x in enumerate(given)]
    out, lse = merge_states(*given)
    assert_close(merge_states(*part), (out[index], lse[of_lse]))


def loss(merged):
    """A sum of out and of the lse that there are."""
    out, lse = merged
    weights = jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)
    return (out * weights).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()


@jax.jit
def gradient(given):
    return jax.grad(lambda x: loss(merge_states(*x)))(given)


@jax.jit
def second(given, direction):
    """The Hessian of the loss, times a direction."""
    return jax.jvp(gradient, (given,), (direction,))[1]


def test_gradients_are_those_of_the_reference():
    given = states(3)
    merged = merge_states(*given)
    dout, dlse = jax.grad(loss)(merged)
    got = gradient(given)
    rows = [np.asarray(x, np.float64) if i % 2 == 0
            else np.asarray(x, np.float64).swapaxes(1, 2)
            for i, x in enumerate((*given, *merged, dout, dlse))]  # fmt: skip
    *parts, out, lse, dout, dlse = rows
    pairs = zip(parts[::2], parts[1::2], strict=True)
    expected = merge_vjp(dout, dlse, list(pairs), out, lse)
    for (want_out, want_lse), dout_i, dlse_i in zip(
        expected, got[::2], got[1::2], strict=True
    ):
        want = want_out, want_lse.swapaxes(1, 2)
        assert_close((dout_i, dlse_i), [x.astype("f") for x in want])


def test_second_derivatives_are_finite_differences():
    with jax.enable_x64(True):
        given = states(2, "float64", shape=(1, 2, 2, 2))
        given = [np.asarray(x) for x in given]
        direction = [np.cos(np.where(np.isfinite(x), x, 0)) for x in given]

        def slope(h):
            ends = (gradient([x + s * h * y for x, y in
                              zip(given, direction, strict=True)])
                    for s in (1, -1))  # fmt: skip
            return [np.subtract(*x) / (2 * h) for x in zip(*ends, strict=True)]

        got = [np.asarray(x) for x in second(given, direction)]
        once, twice = slope(1e-3), slope(2e-3)
    for x, y, z in zip(got, once, twice, strict=True):
        # y errs by a third of its distance from z, and by the roundings of
        # some 50 operations on numbers of size 10, divided by 2e-3.
        bound = np.abs(y - z) + 50 * 10 * 2.0**-53 / 2e-3
        assert_at_most(np.abs(x - y), bound, "np.abs(x - y)")


def test_rows_that_see_no_key_have_no_gradient():
    given = states(3)
    dead = np.asarray(given[1] == -jnp.inf)
    dout, dlse, *_ = map(np.asarray, gradient(given))
    rows = dead.swapaxes(1, 2)
    assert dead.any()
    assert_all(dout[rows], 0, "dout[rows]")
    assert_all(dlse[dead], 0, "dlse[dead]")
    assert dout[~rows].any()
    assert_finite(dout, "dout")


def test_two_parts_of_the_keys_are_trained_as_the_whole():
    given = list(map(on_cpu, inputs().values()))

    def parts(q, k, v):
        return merge_states(
            *attention(q, k[:, :3], v[:, :3], return_lse=True),
            *attention(q, k[:, 3:], v[:, 3:], return_lse=True),
        )

    def whole(q, k, v):
        return attention(q, k, v, return_lse=True)

    def gradients(function):
        return jax.jit(jax.grad(lambda x: loss(function(*x))))(given)

    got, expected = gradients(parts), gradients(whole)
    assert_close(got, expected)


def test_vmap():
    given = states(2)
    given[2] = jnp.nan_to_num(given[2])
    stacked = [jnp.stack([x, x]) for x in given]
    stacked[2] = given[2]
    got = jax.vmap(merge_states, (0, 0, None, 0))(*stacked)
    for x, y in zip(got, merge_states(*given), strict=True):
        assert_same(x[0], x[1])
        assert_close([x[1]], [y])


def test_an_infinite_lse_stays():
    given = states(2)
    given[1] = given[1].at[0].set(jnp.inf)
    out, lse = merge_states(*given)
    assert_all(out[0], np.nan, "out[0]")
    assert_all(lse[0], jnp.inf, "lse[0]")


def test_bad_arguments():
    out, lse = states(1)
    with pytest.raises(ShapeError, match="lse_b has heads 1, expected 3"):
        jax.jit(merge_states)(out, lse, out, lse[:, :1])
    with pytest.raises(DTypeError, match="merge_states got 3 arrays"):
        merge_states(out, lse, out)
    with pytest.raises(DTypeError, match="lse_a is of type list, expected a"):
        merge_states(out, [[1.0]])
