"""Slopes where a factor is 0 and another one infinite, or about to vanish."""

import numpy as np
import pytest

from cuflash.expressions import derivative, nodes
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.expressions.trace import Given, record
from helpers.compare import assert_allclose, assert_finite

SCORES = np.array([-300.0, -100.0, -89.0, -1.0, 0.0, 1.0, 89.0, 100.0])


def slopes(function, dtype=np.float32):
    """Return the first and second derivative at `SCORES`."""
    root = record(lambda s, b, h, i, j: function(s, i - j), "score_mod",
                  Given())[0]  # fmt: skip
    first = derivative.slope(root)
    leaves = {
        nodes.SCORE: SCORES.astype(dtype),
        nodes.index("q_idx"): np.int64(7), nodes.index("kv_idx"): np.int64(3),
    }  # fmt: skip
    with np.errstate(all="ignore"):
        found = Values(leaves, ModArrays([], []), np.dtype(dtype)).of(
            first, derivative.slope(first)
        )
    return [np.broadcast_to(x, SCORES.shape) for x in found]


OVERFLOWING = {
    "sigmoid": lambda s, d: 1 / (1 + np.exp(-s)),
    "swish": lambda s, d: s / (1 + np.exp(-s)),
    "of a power": lambda s, d: 20 * np.tanh(np.exp(s) / 20),
    "of powers": lambda s, d: np.exp(-np.exp(s)),
    "of an inverse": lambda s, d: np.tanh(0.5 / s),
    "root of a branch": lambda s, d: np.sqrt(np.where(s > 0, s, 0.0)),
    "fourth power": lambda s, d: s / (1 + (1e8 * s * s) * (1e8 * s * s)),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_slopes_are_finite_where_the_score_is(name):
    for found in slopes(OVERFLOWING[name]):
        assert_finite(found, name)


# With second derivatives at -1 or 0, where the first ones are 0.
STATIONARY = {
    "a product": (lambda s, d: np.tanh(4 * s * np.exp(s)), -1, 0.279942),
    "a quotient": (lambda s, d: np.exp(s) / (d * s), 1, 0.679570),
    "an even one": (lambda s, d: 1 / (d + s * s), 0, -0.125),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_second_derivatives_where_the_first_is_0(name):
    function, score, second = STATIONARY[name]
    first, found = slopes(function, np.float64)
    (i,) = np.flatnonzero(score == SCORES)
    assert_allclose(first[i], 0.0, name, atol=1e-12)
    assert_allclose(found[i], second, name, rtol=1e-5)
