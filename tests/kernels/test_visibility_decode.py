"""Which keys few queries see whose keys are computed in parts.

By the probes of helpers/visibility.py: tiles, parts and their merge.
"""

import numpy as np
import pytest

from helpers import visibility as probe
from helpers.backends import EMULATED
from helpers.data import Case, Emulation
from helpers.dtypes import DTYPES, lse_dtype
from helpers.visibility_grids import around

# The key tiles of decode/forward_simt.cu and decode/forward.cu.
TILES = {"float32": 32, "bfloat16": 128}
LONG = 640  # five of the larger tiles
EDGES = [*around(LONG - 128, LONG)]

on_kinds = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(
            *EMULATED.values, x, marks=EMULATED.marks, id=f"{x}-emulated"
        )
        for x in TILES
    ],
)


def check(backend, dtype, seen, batch=1, num_sms=5, more=0, **options):
    """Check a call of 3 queries and 2 heads, in parts of the keys."""
    arrays = probe.arrays(dtype, batch, *seen.shape[-2:], 2)
    case = Case(dtype, on=Emulation("sm_80", num_sms=num_sms))
    with backend.running(case):
        probe.check_forward(backend, seen, *arrays, more=more, **options)


@on_kinds
@pytest.mark.parametrize("num_sms", [1, 2, 5, 50])
def test_lengths(backend, dtype, num_sms):
    """Of keys in one part, and in as many as there are tiles."""
    for seqlen_k in EDGES:
        seen = probe.pairs(3, seqlen_k, causal=True)
        check(backend, dtype, seen, num_sms=num_sms, causal=True)


@on_kinds
def test_a_sink_counts_once(backend, dtype):
    """Each query's first key is one before, at and one after a tile's edge.

    Of three queries: the first needs bounds three below the tile's length.
    """
    sink, tile = np.zeros(2, lse_dtype(DTYPES[dtype])), TILES[dtype]
    for seqlen_k in EDGES:
        for window in [(x, 0) for x in (0, *range(tile - 3, tile + 1))]:
            seen = probe.pairs(3, seqlen_k, window=window)
            check(backend, dtype, seen, more=1, window=window, sink=sink)


@on_kinds
def test_segments(backend, dtype):
    """That begin at, before and after tiles; the last has one key."""
    starts = [*around(128, 256, LONG - 128), LONG - 1]
    ids_k = (np.arange(LONG) >= np.array(starts)[:, None]).astype(np.int32)
    ids_q = np.tile(np.array([0, 1, 1], np.int32), (len(starts), 1))
    seen = ids_q[:, None, :, None] == ids_k[:, None, None, :]
    options = {"segment_ids_q": ids_q, "segment_ids_k": ids_k}
    check(backend, dtype, seen, len(starts), num_sms=50, **options)


@on_kinds
def test_masks(backend, dtype):
    """Of one key, which is the only one of its part, and of all but one."""
    keys = [0, *around(128, 256), LONG - 1]
    one = np.arange(LONG) == np.array(keys)[:, None]
    mask = np.concatenate([one, ~one])[:, None, None]
    mask = np.repeat(mask, 3, axis=2)
    check(backend, dtype, mask, len(mask), num_sms=50, mask=mask)
