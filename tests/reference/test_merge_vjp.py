"""The gradient of a merge of results over parts of the keys."""

import functools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.tile_state import TileState, merge_vjp
from helpers.compare import assert_arrays_equal
from helpers.reference_cases import EPS, assert_close

ROWS, HEAD_DIM_V = 4, 3


def merge(results):
    states = (TileState.of_result(*x) for x in results)
    return functools.reduce(TileState.merge, states).finalize()


def drawn(parts, seed, blind=0.3):
    """Return results, some of whose rows see no key, dout and dlse."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((parts, ROWS, HEAD_DIM_V))
    lse = rng.standard_normal((parts, ROWS))
    lse[rng.random(lse.shape) < blind] = -np.inf
    dout = rng.standard_normal((ROWS, HEAD_DIM_V))
    return list(zip(out, lse, strict=True)), dout, rng.standard_normal(ROWS)


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_it_is_the_finite_difference(parts, seed):
    results, dout, dlse = drawn(parts, seed)
    rng = np.random.default_rng(seed + 1)
    moves = [[rng.standard_normal(x.shape) for x in y] for y in results]

    def loss(step):
        out, lse = merge(
            [x + step * a for x, a in zip(result, move, strict=True)]
            for result, move in zip(results, moves, strict=True)
        )
        lse = np.where(lse > -np.inf, lse, 0)
        return (dout * out).sum() + (dlse * lse).sum()

    gradients = merge_vjp(dout, dlse, results, *merge(results))
    got = sum((x * a).sum() for of, move in zip(gradients, moves, strict=True)
              for x, a in zip(of, move, strict=True))  # fmt: skip
    h = 1e-3
    once, twice = ((loss(x) - loss(-x)) / (2 * x) for x in (h, 2 * h))
    # once errs by a third of its distance from twice (h^2 against 4 h^2), and
    # by the roundings of some 20 operations on each term, divided by h.
    size = abs(dout).sum() + abs(dlse).sum()
    assert_close(got, once, abs(twice - once) + 20 * EPS * 10 * size / h)


def test_a_blind_row_has_no_gradient_whatever_its_out():
    results, dout, dlse = drawn(2, 0, blind=0)
    results[1][0][0], results[1][1][0] = np.nan, -np.inf
    (dout_a, dlse_a), (dout_b, dlse_b) = merge_vjp(
        dout, dlse, results, *merge(results)
    )
    assert_arrays_equal(dout_b[0], 0, "dout_b[0]")
    assert dlse_b[0] == 0
    assert_arrays_equal(dout_a[0], dout[0], "dout_a[0]")
    assert dlse_a[0] == dlse[0]
