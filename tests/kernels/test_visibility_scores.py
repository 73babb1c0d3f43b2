"""Which pairs each family sees where options change scores, and in turns.

Biases and slopes hide pairs: 0, or so low that a weight is exactly 0. A sink
of 0 counts as a key.
"""

from itertools import product

import numpy as np

from helpers import visibility as probe
from helpers.dtypes import DTYPES, lse_dtype
from helpers.visibility_grids import around, of, packed, packed_lengths

HIDDEN = -1024.0  # exp of it is 0 in float64 too
SLOPES = np.array([0, -HIDDEN], np.float32)  # head 1 sees distance 0 alone
SINKS = np.array([0, HIDDEN])
ADDED = np.array([[1], [0]])  # to the sums of a head's rows, by its sink


def options_of(grid, seqlen_q, seqlen_k):
    """Return options, and the pairs that have a weight: (1, 2, ...)."""
    rng = np.random.default_rng([seqlen_q, seqlen_k])
    bias = HIDDEN * rng.integers(0, 2, (1, 2, seqlen_q, seqlen_k))
    window = seqlen_k // 2, None
    seen = probe.pairs(seqlen_q, seqlen_k, window=window)
    near = np.eye(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)
    weights = (bias == 0) & seen & np.stack([np.ones_like(near), near])
    dtype = DTYPES[grid.dtype]
    options = {
        "window": window,
        "bias": bias.astype(dtype),
        "alibi_slopes": SLOPES,
        "sink": SINKS.astype(lse_dtype(dtype)),
    }
    return options, weights, seen


def calls_of(grid):
    """Yield the arrays, options, weights and pairs of calls around edges."""
    of_q, of_k = around(*grid.edges_q), around(grid.tile.block_k)
    for sizes in product(of_q, of_k):
        yield probe.arrays(grid.dtype, 1, *sizes, 2), *options_of(grid, *sizes)


@of("forward")
def test_forward(backend, grid):
    with backend.running(grid.case):
        for arrays, options, weights, _ in calls_of(grid):
            grid.check(backend, weights, arrays, more=ADDED, **options)


@of("backward")
def test_backward(backend, grid):
    with backend.running(grid.case):
        for arrays, options, weights, seen in calls_of(grid):
            *got, dbias = probe.gradients(
                backend, seen, *arrays, return_dbias=True, **options
            )
            probe.assert_gradients(got, weights, *arrays[:2], arrays[3])
            probe.report(dbias != weights, "dbias", dbias, weights, "weight")


@of("backward", families=["fma", "mma8_float64", "sm80", "sm90"])
def test_in_turns(backend, grid):
    """dq is summed in a fixed order."""
    of_q, of_k = around(grid.tile.block_q), around(grid.tile.block_k)
    with backend.running(grid.case):
        for sizes in product(of_q, of_k):
            seen = probe.pairs(*sizes, causal=True)
            arrays = probe.arrays(grid.dtype, 1, *sizes)
            grid.check(backend, seen, arrays, causal=True, deterministic=True)


@of("backward", families=["sm90", "sm80"])
def test_packed_in_integers_or_turns(backend, grid):
    """On Hopper parts of dq are integers, of a grid that codes are on."""
    seen, options = packed_lengths(grid)
    arrays = probe.arrays(grid.dtype, 1, *seen.shape)
    options |= {"causal": True, "deterministic": True}
    with backend.running(grid.case):
        grid.check_packed(backend, seen, arrays, **options)


@of("backward", families=["mma8_float64"])
def test_each_sequence_counts_its_own_turns(backend, grid):
    """The first has one tile of queries, the next two, without a gap."""
    of_k = 3 * grid.tile.block_k
    seen, options = packed([(1, of_k), (grid.tile.block_q + 1, of_k)])
    arrays = probe.arrays(grid.dtype, 1, *seen.shape)
    options |= {"causal": True, "deterministic": True}
    with backend.running(grid.case):
        grid.check_packed(backend, seen, arrays, **options)


@of("double_backward", families=["fma", "sm80"])
def test_second_gradients_in_turns(backend, grid):
    sizes = 2 * grid.tile.block_q + 1, 2 * grid.tile.block_k + 1
    seen = probe.pairs(*sizes, causal=True)
    arrays = probe.arrays(grid.dtype, 1, *sizes)
    with backend.running(grid.case):
        grid.check(backend, seen, arrays, causal=True, deterministic=True)
