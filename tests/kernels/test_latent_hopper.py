"""decode/forward_latent.cu: values that are columns of keys, by wgmma."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import KVCache
from helpers import kvcache_calls as kv
from helpers.backends import EMULATED
from helpers.compare import assert_all, assert_finite
from helpers.data import Emulation
from helpers.kernels import small_problem
from helpers.kvcache_calls import KVCase

on_emulator = pytest.mark.parametrize("backend", [EMULATED])

HOPPER = Emulation("sm_90a", num_sms=3)
CASE = KVCase(
    "bfloat16", (1, 63, 200), seqlen_q=1, num_heads_kv=1, group_size=16,
    head_dim=320, head_dim_v=256, page_size=64, latent="yes", causal=True,
    seed=1, on=HOPPER,
)  # fmt: skip


@on_emulator
def test_head_dims_of_models(backend):
    """Two row tiles; a part may have no key."""
    case = replace(CASE, head_dim=576, head_dim_v=512, group_size=66)
    kv.check(backend, replace(case, before=(0, 127), seqlen_new=None))


@on_emulator
@pytest.mark.parametrize(
    "before", [(0, 0), (1, 64), (62, 63), (64, 129), (400, 3)]
)
@pytest.mark.parametrize("page_size", [None, 64])
def test_lengths(backend, before, page_size):
    """Edges of tiles, one token less, as one is appended."""
    kv.check(backend, replace(CASE, before=before, page_size=page_size))


@on_emulator
@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_page_sizes(backend, page_size):
    kv.check(backend, replace(CASE, page_size=page_size))


@on_emulator
@pytest.mark.parametrize("seqlen_q", [2, 4])
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_queries(backend, seqlen_q, num_splits):
    """Rows of several queries, each of which sees one key more."""
    case = replace(CASE, seqlen_q=seqlen_q, seqlen_new=seqlen_q, group_size=17)
    kv.check(backend, replace(case, num_splits=num_splits))


@on_emulator
@pytest.mark.parametrize("head_dims", [(512, 512), (576, 64), (300, 260)])
def test_head_dims(backend, head_dims):
    """P in a tile of its own; a half of padding alone; padded panels."""
    d, dv = head_dims
    kv.check(backend, replace(CASE, head_dim=d, head_dim_v=dv))


@on_emulator
@pytest.mark.parametrize("values", ["rising", "punishing"])
def test_maxima_that_change(backend, values):
    kv.check(backend, replace(CASE, values=values, seqlen_new=None))


OPTIONS = {
    "window": {"window": (20, 1), "seqlen_q": 3, "seqlen_new": 3},
    "scores": {
        "softcap": 20.0, "scale": -0.3,
        "arrays_of": ("alibi_slopes_of_batches", "sink"),
    },
    "ragged": {"ragged": (3, 0, 5), "packed_new": True, "unused": 2},
    "slots": {"page_size": None, "slots": True, "leftpad": (0, 3, 70)},
}  # fmt: skip


@on_emulator
@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, name):
    kv.check(backend, replace(CASE, **OPTIONS[name]))


@on_emulator
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_order_of_warps(backend, seed):
    kv.check(backend, replace(CASE, on=replace(HOPPER, seed=seed)))


@on_emulator
@pytest.mark.parametrize("column", [0, 255, 300])
def test_masked_nan_does_not_spread(backend, column):
    """The first of two queries does not see the last key, with its value."""
    case = replace(CASE, seqlen_q=2, seqlen_new=None, before=(70, 200))
    given = case.arguments()
    given["k_cache"][case.index(given, 1, 199, 200)][..., column] = 0
    given["k_cache"][(*case.index(given, 1, 199, 200), 0, column)] = np.nan
    (out, lse), _ = kv.run(backend, case, given)
    assert_finite(out[:, 0], "out of the first query")
    assert_finite(lse[..., 0], "lse of the first query")
    assert_all(np.isnan(out[1, 1]), True, "NaN of the second query")


@on_emulator
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_beside_rows_without_weights(backend, num_splits):
    """Rows that see no key are 0, whose sums became 0 * NaN; so is a row
    whose sink outweighs its keys. A row that sees the NaN is NaN."""
    case = replace(
        CASE, before=(1, 66), seqlen_q=3, seqlen_new=None, arrays_of=("sink",),
        num_splits=num_splits,
    )  # fmt: skip
    given = case.arguments()
    given["sink"][:2] = 300.0
    for sequence, length in enumerate(case.before):
        key = case.index(given, sequence, length - 1, length)
        given["k_cache"][(*key, 0, 0)] = np.nan
    (out, _), _ = kv.run(backend, case, given)
    assert_all(out[0, :2], 0, "out of queries without a key")
    assert_finite(out[1, :2], "out of queries before the NaN")
    assert_all(out[1, :2, :2], 0, "out beside a large sink")
    assert_all(np.isnan(out[:, 2]), True, "NaN of the last queries")


def test_which_calls_run_it():
    """Also one query head; others are of the decode kernels."""
    cache = KVCache("bfloat16", 64, 9, 2, lengths=True, latent=True)
    sizes = {"seqlen_q": 1, "num_heads_q": 1, "seqlen_k": 128}
    call = small_problem(
        "kvcache", "bfloat16", 576, head_dim_v=512, kvcache=cache, **sizes
    )
    device = device_of_arch("sm_90a")
    (kernel, _) = plan(call, device).kernels
    assert kernel.file == "decode/forward_latent.cu"
    assert plan(call, device_of_arch("sm_80")).family == "decode_simt"
    apart = replace(call, kvcache=replace(cache, latent=False))
    assert plan(apart, device).family == "decode_simt"
