"""Which pairs each family of kernels sees, one by one, around tiles' edges.

The probes (helpers/visibility.py) need no tolerance: one key too many or too
few shows in any call, however many keys there are. Calls of a test share a
compiled program, so that they meet all edges.
"""

from itertools import product

import numpy as np
import pytest

from helpers import visibility as probe
from helpers.visibility_grids import (
    around,
    on_families,
    packed_lengths,
    windows_at_edges,
)


@on_families
def test_causal_lengths(backend, grid):
    """Each length one token before, at and one after a tile's edge."""
    of_q, of_k = around(*grid.edges_q), around(grid.tile.block_k)
    with backend.running(grid.case):
        for seqlen_q, seqlen_k in product(of_q, of_k):
            seen = probe.pairs(seqlen_q, seqlen_k, causal=True)
            arrays = probe.arrays(grid.dtype, 1, seqlen_q, seqlen_k)
            grid.check(backend, seen, arrays, causal=True)


@on_families
def test_windows(backend, grid):
    """The first and last rows of tiles see up to, at and past tiles' edges.

    With fewer queries than keys by two bounds at once, with more by either.
    """
    block_q, block_k = grid.tile.block_q, grid.tile.block_k
    few = 2 * block_q + 1, 2 * block_k + 3
    left, right = windows_at_edges(grid.tile, *few)
    count = max(len(left), len(right))
    both = zip(np.resize(left, count), np.resize(right, count), strict=True)
    of = {few: [(left[0], 0), *((int(x), int(y)) for x, y in both)]}
    many = block_q + block_k + 3, block_k + 3
    left, right = windows_at_edges(grid.tile, *many)
    of[many] = [(x, None) for x in left] + [(None, x) for x in right]
    with backend.running(grid.case):
        for lengths, windows in of.items():
            arrays = probe.arrays(grid.dtype, 1, *lengths)
            for window in windows:
                seen = probe.pairs(*lengths, window=window)
                grid.check(backend, seen, arrays, window=window)


@on_families
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_segments(backend, grid, causal):
    """Each boundary one token before, at and one after a tile's edge.

    Or the last query or key is a segment of its own.
    """
    of_q, of_k = around(*grid.edges_q), around(grid.tile.block_k)
    seqlen_q, seqlen_k = of_q[-1] + 2, of_k[-1] + 2
    last = [(seqlen_q - 1, of_k[1]), (of_q[1], seqlen_k - 1)]
    starts = np.array([*product(of_q, of_k), *last])
    ids_q = (np.arange(seqlen_q) >= starts[:, :1]).astype(np.int32)
    ids_k = (np.arange(seqlen_k) >= starts[:, 1:]).astype(np.int32)
    same = ids_q[:, None, :, None] == ids_k[:, None, None, :]
    seen = same & probe.pairs(seqlen_q, seqlen_k, causal=causal)
    arrays = probe.arrays(grid.dtype, len(starts), seqlen_q, seqlen_k)
    options = {"segment_ids_q": ids_q, "segment_ids_k": ids_k}
    with backend.running(grid.case):
        grid.check(backend, seen, arrays, causal=causal, **options)


@on_families
def test_masks(backend, grid):
    """Masks of one pair, of whole tiles and of all pairs but one."""
    seqlen_q, seqlen_k = 2 * grid.tile.block_q + 1, 2 * grid.tile.block_k + 1
    mask = np.zeros((6, 1, seqlen_q, seqlen_k), bool)
    mask[0, 0, seqlen_q - 1, seqlen_k - 1] = True
    mask[1, 0, grid.tile.block_q, grid.tile.block_k - 1] = True
    mask[2, 0, : grid.tile.block_q, grid.tile.block_k :] = True
    mask[3:] = ~mask[:3]
    arrays = probe.arrays(grid.dtype, 6, seqlen_q, seqlen_k)
    with backend.running(grid.case):
        grid.check(backend, mask, arrays, mask=mask)


@on_families
def test_packed_lengths(backend, grid):
    """Sequences of all lengths around a tile's edge, end to end, causal.

    In turns that each sequence counts, of one family.
    """
    seen, options = packed_lengths(grid)
    arrays = probe.arrays(grid.dtype, 1, *seen.shape)
    if (grid.family, grid.direction) == ("mma8_float64", "backward"):
        options["deterministic"] = True
    with backend.running(grid.case):
        grid.check_packed(backend, seen, arrays, causal=True, **options)
