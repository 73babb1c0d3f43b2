"""A user's score_mod and mask_mod over caches of keys and values."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import kvcache_calls as kv
from helpers.backends import BACKENDS
from helpers.data import Emulation
from helpers.kvcache_calls import KVCase

CASE = KVCase(
    "bfloat16", (20, 7, 130), seqlen_new=8, seqlen_q=8, head_dim=64,
    head_dim_v=64, page_size=16, seed=1, causal=True,
)  # fmt: skip
CASES = {
    "pages": CASE,
    "float8": replace(CASE, scales="page", page_size=24, num_splits=3),
    "ragged": replace(CASE, ragged=(3, 8, 1), packed_new=True, unused=2),
    "left padding": replace(
        CASE, page_size=None, spare=2, slots=True, leftpad=(5, 0, 128)
    ),
    "any dtype": replace(CASE, dtype="float32", head_dim=32, rotary_dim=16),
    "Hopper": replace(
        CASE, group_size=8,
        on=Emulation("sm_90a", seed=1, family="decode_sm90"),
    ),
    "latent": replace(
        CASE, latent="yes", head_dim=320, head_dim_v=256, num_heads_kv=1,
        group_size=8, on=Emulation("sm_90a", seed=1),
    ),
    "whole": replace(
        CASE, dtype="float64", head_dim=32, by_int=True, before=(40, 40),
    ),
}  # fmt: skip

_NODES = np.arange(8)
# Nodes of two chains see their own, and the root.
ANCESTORS = (_NODES[:, None] - _NODES) % 2 == 0
ANCESTORS[:, 0] = True


def tree(b, h, q_idx, kv_idx, *, is_ancestor, seqlen_q, seqlen_k):
    context = seqlen_k - seqlen_q
    return (kv_idx < context) | is_ancestor[q_idx, kv_idx - context]


def fading(score, b, h, q_idx, kv_idx, *, rate, table, n, seqlen_k):
    """The first keys have most of the weight."""
    distance = kv_idx - q_idx * n
    return score - rate[b, h] * (seqlen_k - distance) + table[kv_idx]


def sees_token(b, h, q_idx, kv_idx, *, token):
    return kv_idx == token[h] + b


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_drafts_of_a_tree(backend, name):
    """Each of the last tokens sees the text before it and its ancestors."""
    case = CASES[name]
    heads = case.num_heads_q
    arrays = {
        "rate": np.linspace(-0.2, 0.1, 3 * heads, dtype=np.float32),
        "table": np.sin(np.arange(70.0)),
        "is_ancestor": ANCESTORS,
        "n": 2,
    }
    arrays["rate"] = arrays["rate"].reshape(3, heads)

    def meaning(b, shape):
        _, h, q, k = np.ogrid[tuple(map(slice, shape))]
        rate, table, size = arrays["rate"][b], arrays["table"], shape[3]
        place, context = np.minimum(k, 70), size - shape[2]
        bias = -rate[h].astype(float) * (size - (k - 2 * q))
        bias = bias + np.append(table, 0)[place]
        last = np.clip(k - context, 0, 7)
        sees = (k < context) | ANCESTORS[np.minimum(q, 7), last]
        return {"bias": np.broadcast_to(bias, shape),
                "mask": np.broadcast_to(sees, shape)}  # fmt: skip

    placed = {
        x: backend.place(y) if isinstance(y, np.ndarray) else y
        for x, y in arrays.items()
    }
    kv.check(
        backend, case, meaning, score_mod=fading, mask_mod=tree,
        mod_arrays=placed,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_token_a_head(backend, dtype):
    """Whose value is the result, on both sides of a page's and tile's edge."""
    token = np.array([15, 16, 62, 63], np.int16)
    case = replace(CASE, dtype=dtype, before=(90, 64, 130), causal=False)

    def meaning(b, shape):
        _, h, _, k = np.ogrid[tuple(map(slice, shape))]
        return {"mask": np.broadcast_to(k == token[h] + b, shape)}

    kv.check(
        backend, case, meaning, mask_mod=sees_token,
        mod_arrays={"token": backend.place(token)},
    )  # fmt: skip
