"""Intervals of tiles hold every pair's value."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuflash.errors import ExpressionError
from cuflash.expressions import intervals, nodes
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.expressions.intervals import ALL, NONE, Extremes, Intervals
from cuflash.expressions.trace import ArrayKind, Given, record
from helpers import drawn_expressions as drawn
from helpers.compare import assert_arrays_equal

B, H, QUERY, KEY, SEQLEN_Q, SEQLEN_K = map(
    nodes.index, (*nodes.INDICES, *nodes.LENGTHS)
)
QUERIES, KEYS, BLOCK_Q, BLOCK_K = 29, 37, 8, 5


def recorded(mask, arrays, numbers):
    kinds = {"count": "int", "ratio": "real"}
    found, _ = record(
        mask,
        "mask_mod",
        Given(
            tuple(
                (x, ArrayKind(y.dtype.name, y.ndim)) for x, y in arrays.items()
            ),
            tuple((x, kinds[x]) for x in numbers),
        ),
    )
    return found


def whole(mask, arrays, numbers=(), real=np.float32):
    """Return the mask of each pair of 2 batches and 3 heads."""
    leaves = {
        B: np.arange(2)[:, None, None, None],
        H: np.arange(3)[:, None, None],
        QUERY: np.arange(QUERIES, dtype=np.int32)[:, None],
        KEY: np.arange(KEYS, dtype=np.int32),
        SEQLEN_Q: np.int32(QUERIES),
        SEQLEN_K: np.int32(KEYS),
    }
    given = ModArrays([*arrays.values()], numbers)
    with np.errstate(all="ignore"):
        (found,) = Values(leaves, given, real).of(mask)
    return np.broadcast_to(found, (2, 3, QUERIES, KEYS))


def flags_of(mask, arrays, numbers=(), real=np.float32):
    """Return the flags of all tiles."""
    heads = np.arange(2)[:, None, None, None], np.arange(3)[:, None, None]
    starts = (
        np.arange(0, QUERIES, BLOCK_Q)[:, None],
        np.arange(0, KEYS, BLOCK_K),
    )
    leaves = {
        **{x: (y, y) for x, y in zip((B, H), heads, strict=True)},
        QUERY: (starts[0], np.minimum(starts[0] + BLOCK_Q, QUERIES) - 1),
        KEY: (starts[1], np.minimum(starts[1] + BLOCK_K, KEYS) - 1),
        SEQLEN_Q: (QUERIES, QUERIES),
        SEQLEN_K: (KEYS, KEYS),
    }
    extremes = Extremes([*arrays.values()])
    found = Intervals(leaves, numbers, real, extremes).visibility(mask)
    return np.broadcast_to(found, (2, 3, starts[0].size, starts[1].size))


def by_pairs(visible):
    """Return the flags that the pairs of all tiles make."""
    rows, columns = range(0, QUERIES, BLOCK_Q), range(0, KEYS, BLOCK_K)
    found = [
        [visible[..., i : i + BLOCK_Q, j : j + BLOCK_K] for j in columns]
        for i in rows
    ]
    every = [[x.all(axis=(-1, -2)) for x in row] for row in found]
    some = [[x.any(axis=(-1, -2)) for x in row] for row in found]
    flags = np.add(every, some, dtype=np.int8)
    return np.moveaxis(flags, (0, 1), (-2, -1))


@given(st.integers(0, 2**32), st.sampled_from([np.float32, np.float64]))
def test_a_flag_is_right_or_unknown(seed, real):
    arrays, numbers = drawn.arrays(), drawn.NUMBERS
    try:
        mask = recorded(drawn.mask(seed), arrays, numbers)
    except ExpressionError:  # constants alone, or too large
        assume(False)
    given = mask, arrays, [*numbers.values()], real
    found, want = flags_of(*given), by_pairs(whole(*given))
    assert_arrays_equal(found == ALL, (found == ALL) & (want == ALL), "all")
    assert_arrays_equal(
        found == NONE, (found == NONE) & (want == NONE), "none"
    )


def causal(b, h, i, j, *, seqlen_q, seqlen_k):
    return j <= i + seqlen_k - seqlen_q


def window(b, h, i, j):
    return (i - j <= 7) & (j - i <= 3)


def prefix(b, h, i, j, *, lengths):
    return (j < lengths[b]) | (j <= i)


def documents(b, h, i, j, *, ids):
    return (ids[b, i] == ids[b, j]) & (i >= j)


def by_head(b, h, i, j):
    return np.abs(i - j) < 4 * (h + 1)


def distance(b, h, i, j):
    return (i - j) * 0.25 < 2.0


def relative(b, h, i, j, *, near):
    return near[i - j + 40]


@pytest.mark.parametrize(
    "function",
    [causal, window, prefix, documents, by_head, distance, relative],
)
def test_usual_masks_are_decided(function):
    """Those whose conditions do not hide each other's tiles."""
    arrays = {
        "ids": np.sort(np.random.default_rng(0).integers(0, 5, (2, 37))),
        "lengths": np.array([11, 23]),
        "near": np.arange(80) % 40 < 15,
    }
    names = function.__code__.co_varnames
    arrays = {x: y for x, y in arrays.items() if x in names}
    mask = recorded(function, arrays, {})
    want = by_pairs(whole(mask, arrays))
    found = flags_of(mask, arrays)
    assert_arrays_equal(found, want, "flags")


def test_long_slices_are_not_known(monkeypatch):
    monkeypatch.setattr(intervals, "LONGEST_SLICE", BLOCK_K)
    ids = {"ids": np.zeros((2, 37), np.int64)}
    mask = recorded(documents, ids, {})
    flags = flags_of(mask, ids)
    # What i >= j hides is known; the ids of 8 queries are not.
    assert_arrays_equal(np.unique(flags), [NONE, 1], "flags")
