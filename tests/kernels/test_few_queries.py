"""More rows of a key head than 32, on Hopper: decode/forward_sm90.cu.

A row is a query of a query head of the group.
"""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from helpers import visibility as probe
from helpers.backends import on_kernels
from helpers.checks import check_forward
from helpers.compare import assert_allclose
from helpers.data import Case, Emulation
from helpers.option_cases import ALL

ON = Emulation("sm_90a", num_sms=7, seed=1, family="decode_sm90")
# 23 queries of three heads are 69 rows; parts of 600 keys are cut at 128.
CASE = Case("bfloat16", 1, 23, 600, 6, 2, 64, 64, seed=1, on=ON)


@on_kernels
@pytest.mark.parametrize("num_sms", [1, 7])
@pytest.mark.parametrize(
    "rows", [1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025]
)
def test_rows(backend, rows, num_sms):
    """One below, at and above tiles of 64 and 128; in one part and in parts.

    With more queries than keys some rows, or parts, see no key.
    """
    seen = probe.pairs(rows, 600, causal=True)
    arrays = probe.arrays("bfloat16", 1, rows, 600, 2)
    with backend.running(replace(CASE, on=replace(ON, num_sms=num_sms))):
        probe.check_forward(backend, seen, *arrays, causal=True)


@on_kernels
@pytest.mark.parametrize("seqlen_k", [511, 512, 513, 640, 641])
def test_keys(backend, seqlen_k):
    """One before, at and after a key tile's end; parts that see nothing."""
    seen = probe.pairs(65, seqlen_k, window=(5, 0))
    arrays = probe.arrays("bfloat16", 1, 65, seqlen_k, 2)
    with backend.running(CASE):
        probe.check_forward(backend, seen, *arrays, window=(5, 0))


@on_kernels
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", [{"causal": True}, ALL], ids=["", "all"])
def test_groups(backend, options, num_splits):
    case = replace(CASE, **options)
    on = replace(ON, num_sms=2 * num_splits)
    check_forward(backend, replace(case, on=on))


@on_kernels
@pytest.mark.parametrize(
    "head_dims", [(32, 96), (96, 32), (192, 128), (256, 256), (40, 200)]
)
def test_head_dims(backend, head_dims):
    head_dim, head_dim_v = head_dims
    check_forward(
        backend, replace(CASE, head_dim=head_dim, head_dim_v=head_dim_v)
    )


@on_kernels
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_masked_value_does_not_spread(backend, value):
    """Of the last key, which only the last query sees; and key 9 of all."""
    spoiled = (("v", (0, 599), value), ("v", (0, 9), value))
    check_forward(backend, replace(CASE, causal=True, spoiled=spoiled))


@on_kernels
@pytest.mark.parametrize("maximum", [2.0, 2e3, 2e4])
def test_growing_maxima(backend, maximum):
    """Of 100 keys each; from 4,096 on other exponents (weigh_row)."""
    q = np.ones((1, 66, 1, 32), np.float16)
    k, v = np.zeros((2, 1, 600, 1, 32), np.float16)
    k[0, :, 0, 0] = np.arange(600) // 100 / 8
    v[0, :, 0, 0] = np.arange(600) % 7 + 1
    scores = k[0, :, 0, 0].astype(np.float64) * maximum
    weights = np.exp(scores - scores.max())
    with backend.running(replace(CASE, dtype="float16")):
        out, lse = cuflash.forward(
            *map(backend.place, (q, k, v)), scale=maximum, return_lse=True
        )
    # P and O are rounded to float16, lse is to float32.
    want = weights @ v[0, :, 0, 0].astype(np.float64) / weights.sum()
    got = np.asarray(backend.fetch(out), np.float64)[..., 0]
    assert_allclose(got, np.full_like(got, want), "out", rtol=2**-10)
    want = scores.max() + np.log(weights.sum())
    lse = backend.fetch(lse)
    assert_allclose(lse, np.full_like(lse, want), "lse", rtol=2**-22)


def cache_of(lengths, pages):
    """Return q, caches and the visible pairs of 33 queries, two heads."""
    q, k, v, _ = probe.arrays("bfloat16", len(lengths), 33, 272, 2, 1)
    seen = np.zeros((len(lengths), 1, 33, 272), bool)
    for pairs, n in zip(seen[:, 0], lengths, strict=True):
        pairs[:, :n] = probe.pairs(33, n, causal=True)
    options = {"k_cache": k, "v_cache": v}
    if pages:
        order = np.random.default_rng(0).permutation(k.size // k[0, :16].size)
        for name, x in list(options.items()):
            options[name] = x.reshape(-1, 16, *x.shape[2:])[order]
        table = np.argsort(order).astype(np.int32)
        options["page_table"] = table.reshape(len(lengths), -1)
    return q, v, options, seen


@on_kernels
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_caches(backend, pages, num_splits):
    """Of ragged lengths, some of which are 0 or less than the queries."""
    lengths = np.array([0, 1, 32, 127, 128, 129, 255, 257, 272, 0], np.int32)
    q, v, options, seen = cache_of(lengths, pages)
    with backend.running(CASE):
        out, lse = cuflash.forward_kvcache(
            backend.place(q), cache_seqlens=backend.place(lengths),
            causal=True, scale=1.0, num_splits=num_splits, return_lse=True,
            **{name: backend.place(x) for name, x in options.items()},
        )  # fmt: skip
    out, lse = backend.fetch(out), backend.fetch(lse)
    probe.assert_states(out, lse, seen, q, v)
