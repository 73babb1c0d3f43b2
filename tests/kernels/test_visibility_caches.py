"""Which cached tokens each query sees, around edges of tiles, pages and parts.

By the probes of helpers/visibility.py. One call has sequences of all lengths
that matter, so it compiles one program.
"""

import numpy as np
import pytest

import cuflash
from helpers import visibility as probe
from helpers.backends import EMULATED
from helpers.data import Case, Emulation
from helpers.visibility_grids import around

PAGE = 16
# The key tile of decode/forward_simt.cu and that of decode/forward.cu, at
# multiples of which parts begin.
TILES = {"float32": 32, "bfloat16": 128}
CAPACITY = 272

on_kinds = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(
            *EMULATED.values, x, marks=EMULATED.marks, id=f"{x}-emulated"
        )
        for x in TILES
    ],
)


def lengths_of(dtype):
    return [1, *around(PAGE, TILES[dtype], 2 * TILES[dtype])]


def seen_of(lengths, seqlen_q, window, leftpad):
    """Return the visible pairs of each sequence, with `CAPACITY` keys."""
    leftpad = np.zeros(len(lengths), int) if leftpad is None else leftpad
    seen = np.zeros((len(lengths), 1, seqlen_q, CAPACITY), bool)
    window = window or (None, None)
    for pairs, n, pad in zip(seen[:, 0], lengths, leftpad, strict=True):
        pairs[:, :n] = probe.pairs(seqlen_q, n, window=window)
        pairs[:, :pad] = False
    return seen


def paged(cache, seed=0):
    """Cut a cache into pages in a random order; return it and the table."""
    batch, capacity, *rest = cache.shape
    pages = cache.reshape(batch * capacity // PAGE, PAGE, *rest)
    order = np.random.default_rng(seed).permutation(len(pages))
    table = np.argsort(order).astype(np.int32)
    return pages[order], table.reshape(batch, -1)


def check(
    backend, dtype, window, pages=False, leftpad=None, lengths=None, **options
):
    """Check a call of 3 queries and 2 heads for each length."""
    lengths = np.array(lengths or lengths_of(dtype), np.int32)
    seen = seen_of(lengths, 3, window, leftpad)
    q, k, v, _ = probe.arrays(dtype, len(lengths), 3, CAPACITY, 2)
    caches = {"k_cache": k, "v_cache": v}
    if pages:
        caches["k_cache"], options["page_table"] = paged(k)
        caches["v_cache"], _ = paged(v)
    if leftpad is not None:
        options["cache_leftpad"] = leftpad
    with backend.running(Case(dtype, on=Emulation("sm_80", num_sms=5))):
        out, lse = cuflash.forward_kvcache(
            q, **caches, cache_seqlens=lengths, window=window,
            scale=1.0, return_lse=True, **options,
        )  # fmt: skip
    probe.assert_states(out, lse, seen, q, v)


@on_kinds
@pytest.mark.parametrize("splits", [None, 1, 2, 3])
def test_lengths(backend, dtype, splits):
    """Of sequences that a warp finds in its second round, 32 at a time."""
    lengths = [0] * 32 + lengths_of(dtype)
    check(backend, dtype, None, lengths=lengths, num_splits=splits)


@on_kinds
def test_more_sequences_than_a_warp_has_lanes(backend, dtype):
    """Eight lanes have a long one, then a short one as all others are.

    If all were short, blocks would have equal runs, of 4 or 8 sequences, and
    the last one's second tile would not be in its run.
    """
    lengths = [2 * TILES[dtype]] * 8 + [TILES[dtype]] * 32
    check(backend, dtype, None, lengths=lengths)


@on_kinds
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_windows_begin_in_different_tiles(backend, dtype, pages):
    """Each query's first key is one before, at and one after a tile's edge.

    Of three queries: the first needs bounds three below the tile's length.
    """
    tile = TILES[dtype]
    for left in (0, *range(tile - 3, tile + 2)):
        check(backend, dtype, (left, 0), pages)
    for right in (1, None):
        check(backend, dtype, (tile, right), pages, num_splits=2)


@on_kinds
def test_left_padding(backend, dtype):
    """Before, at and after an edge of tiles, and more than there is."""
    few = [0, 1, *around(TILES[dtype])]
    leftpad = np.resize(few, len(lengths_of(dtype))).astype(np.int32)
    for splits in (1, 2):
        check(backend, dtype, None, leftpad=leftpad, num_splits=splits)
