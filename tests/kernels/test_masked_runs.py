"""A user's mask over many tiles of a cache, counted key by key.

Queries are 0, so each visible key has the same weight, and lse is the
logarithm of how many there are. Values are columns of the identity, so
out tells how many there are of each residue.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from helpers.backends import BACKENDS
from helpers.compare import assert_arrays_equal
from helpers.data import Emulation
from helpers.dtypes import DTYPES

QUERIES, COLUMNS, CAPACITY = 8, 64, 4368
# The cases of decode/row_tile.cuh's VisitedTiles, each a sequence: hidden
# at the start; a run that begins with tile 32 or 64, after hidden ones; two
# runs of full tiles; hidden but for both ends.
LENGTHS = np.array([4301, 4299, 1025, 2175], np.int32)
SINKS = np.array([0, 259, 600, 1], np.int32)
STARTS = np.array([300, 4096, 700, 9999], np.int32)
ANCESTORS = np.tri(QUERIES, dtype=bool)
ANCESTORS[5:, 2:5] = False

KINDS = {
    "decode": ("bfloat16", 2, Emulation("sm_80")),
    "Hopper": ("bfloat16", 8, Emulation("sm_90a", family="decode_sm90")),
    "any dtype": ("float32", 1, Emulation("sm_80")),
}


def runs(b, h, q_idx, kv_idx, *, sinks, starts, tree, seqlen_q, seqlen_k):
    text = seqlen_k - seqlen_q
    middle = (kv_idx >= starts[b]) & (kv_idx < text)
    drafts = (kv_idx >= text) & tree[q_idx, kv_idx - text]
    return (kv_idx < sinks[b]) | middle | drafts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_splits", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_each_visible_key_counts_once(backend, kind, num_splits):
    dtype, group, on = KINDS[kind]
    place = backend.place
    q = np.zeros((len(LENGTHS), QUERIES, group, COLUMNS), DTYPES[dtype])
    v = np.eye(COLUMNS, dtype=q.dtype)[np.arange(CAPACITY) % COLUMNS]
    v = np.repeat(v[None, :, None], len(LENGTHS), axis=0)
    pages = {}
    if kind == "decode":
        v = v.reshape(-1, 48, *v.shape[2:])
        numbers = np.arange(len(v), dtype=np.int32)
        pages["page_table"] = place(numbers.reshape(len(LENGTHS), -1))
    arrays = {"sinks": SINKS, "starts": STARTS, "tree": ANCESTORS}
    with backend.running(SimpleNamespace(on=on)):
        out, lse = cuflash.forward_kvcache(
            place(q), place(np.ones_like(v)), place(v),
            cache_seqlens=place(LENGTHS), num_splits=num_splits,
            mask_mod=runs, return_lse=True, **pages,
            mod_arrays={x: place(y) for x, y in arrays.items()},
        )  # fmt: skip
    out, lse = (backend.fetch(x).astype(float) for x in (out, lse))
    for b, length in enumerate(LENGTHS):
        counts = counts_of(b, length)[:, None]
        # Sums of ones are exact. lse's error is below 2^-20, of a count of
        # at most 4,301; out's is 2^-9, of 68.
        total = counts.sum(-1).repeat(group, axis=1)
        assert_arrays_equal(np.rint(np.exp(lse[b].T)), total, "exp(lse)", b)
        found = np.rint(out[b] * total[..., None])
        assert_arrays_equal(found, counts.repeat(group, axis=1), "out", b)


def counts_of(b, length):
    """How many keys of each residue each query sees."""
    keys, text = np.arange(length), length - QUERIES
    sees = (keys < SINKS[b]) | (keys >= STARTS[b]) & (keys < text)
    sees = np.tile(sees, (QUERIES, 1))
    sees[:, text:] |= ANCESTORS
    return sees.astype(int) @ np.eye(COLUMNS, dtype=int)[keys % COLUMNS]
