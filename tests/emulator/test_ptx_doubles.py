"""mma_16x8x8, in double: exact where it must be, else bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.bits import SEEDS
from helpers.compare import assert_arrays_equal, assert_at_most
from helpers.small_kernels import on_both, read_only, run

UNIT = 2.0**-53


def multiplied(a, b, c, backend):
    """Return a @ b + c of (n, 16, 8), (n, 8, 8) and (n, 16, 8) arrays."""
    d = np.empty(c.shape)
    run(
        "primitives/multiply_doubles",
        {"a": read_only(a), "b": read_only(b), "c": read_only(c), "d": d},
        backend,
        blocks=len(c),
    )
    return d


def tiles(draw, n=4):
    """Draw a, b and c, each by draw(shape)."""
    return (draw(x).astype(float) for x in ((n, 16, 8), (n, 8, 8), (n, 16, 8)))


@on_both
@given(seed=SEEDS)
def test_small_integers_are_exact(backend, seed):
    rng = np.random.default_rng(seed)
    a, b, c = tiles(lambda shape: rng.integers(-(2**20), 2**20, shape))
    assert_arrays_equal(multiplied(a, b, c, backend), a @ b + c, "multiplied")


@on_both
@given(seed=SEEDS, spread=st.integers(0, 40))
def test_sums_are_right_to_their_bound(backend, seed, spread):
    """Eight fused multiply-adds in any order, and NumPy's own sum.

    A partial sum is below S = sum |a b| + |c| but for roundings; each of
    eight is off by UNIT S at most. NumPy rounds products as well: 16 more.
    """
    rng = np.random.default_rng(seed)

    def draw(shape):
        exponents = rng.integers(-spread, spread + 1, shape)
        return rng.standard_normal(shape) * 2.0**exponents

    a, b, c = tiles(draw)
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    error = np.abs(multiplied(a, b, c, backend) - (a @ b + c))
    assert_at_most(error, 24 * (1 + 24 * UNIT) * UNIT * size, "error")


@on_both
@given(seed=SEEDS, share=st.sampled_from([0.01, 0.1, 0.5]))
def test_infinities_and_nan(backend, seed, share):
    """inf 0 and inf - inf are NaN, all else follows."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        strange = rng.choice([np.inf, -np.inf, np.nan, 0], shape)
        ordinary = rng.integers(-4, 5, shape)
        return np.where(rng.random(shape) < share, strange, ordinary)

    a, b, c = tiles(draw)
    d = multiplied(a, b, c, backend)
    with np.errstate(invalid="ignore"):
        expected = (a[..., None] * b[:, None]).sum(axis=2) + c
    assert_arrays_equal(d, expected, "d")
