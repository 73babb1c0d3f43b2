"""max_score, the largest score of each row that the softmax takes."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.errors import DTypeError
from cuflash.plans.tiles import Tile
from cuflash.request.validate import host_values
from helpers import calls, expected
from helpers.backends import EMULATED, on_backends, on_kernels
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_matches,
    assert_within,
)
from helpers.data import SIMT, Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.option_cases import FAMILIES
from helpers.packed import max_scores_of_sequences, packed_inputs

HOPPER = Emulation("sm_90a", num_sms=1)
# Several tiles of keys, rows that see none, grouped heads.
PLAIN = Case(
    "bfloat16", 2, 150, 140, 4, 2, 40, 24, causal=True, scale=-0.2,
)  # fmt: skip
OF_FAMILY = {
    "sm90": replace(PLAIN, on=HOPPER),
    "sm90 wide": replace(PLAIN, head_dim=264, on=HOPPER),
    "sm80": PLAIN,
    "sm80 wide": replace(PLAIN, head_dim=264),
    "fma": replace(PLAIN, dtype="float32"),
    "mma8 float64": replace(PLAIN, dtype="float64"),
    "mma8 tf32x3": replace(PLAIN, dtype="float32", precision="tf32x3"),
    "simt": replace(PLAIN, dtype="float32", on=SIMT),
    # Keys in parts, merged.
    "decode": Case("bfloat16", 2, 3, 600, 4, 2, 40, 24, scale=-0.2),
    "decode_simt": Case("float32", 2, 2, 600, 4, 2, 40, 24, scale=-0.2),
}


of_each_family = pytest.mark.parametrize("family", OF_FAMILY)


def check(backend, case):
    q, k, v, _ = inputs(case)
    _, _, got = calls.forward(backend, case, q, k, v, return_max_score=True)
    want = expected.max_score(q, k, sums=case.sums(), **case.meaning())
    assert_matches(got, want, "max_score", case)


@on_backends
@of_each_family
def test_each_family(backend, family):
    check(backend, OF_FAMILY[family])


@on_each_backend(strategies.cases, archs=strategies.FAMILIES, wide=True)
def test_any_shape(backend, case):
    check(backend, case)


@on_each_backend(strategies.optional_cases, archs=strategies.FAMILIES)
def test_any_options(backend, case):
    check(backend, case)


@on_each_backend(strategies.decode_cases)
def test_few_queries(backend, case):
    check(backend, case)


@on_backends
@of_each_family
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_nan_and_inf(backend, family, kind):
    """Rows see NaN alone, or also a score of inf or -inf."""
    case = OF_FAMILY[family]
    last = case.seqlen_k - 10
    spoiled = (("k", (0, last, 0, 1), "nan"), ("q", (0, 0, 3, 0), "nan"))
    if kind == "inf" and case.precision is None:  # tf32x3 takes it for NaN
        spoiled += (("k", (0, 10, 0, 0), "inf"),)
    check(backend, replace(case, spoiled=spoiled))


@on_kernels
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("wgmma", "grouped"), ("bfloat16", "several"), ("fma", "small"),
        ("dmma", "several"), ("tf32x3", "several"), ("simt64", "several"),
    ],
)  # fmt: skip
def test_all_options(backend, family, shape):
    check(backend, FAMILIES[family].case(shape, "all"))


# Where warps on Hopper keep an old maximum, larger scores notwithstanding ----

KEPT = Case(
    "bfloat16", 1, 130, 600, head_dim_v=16,
    on=Emulation("sm_90a", forward_tile=Tile(128, 64, 12, num_stages=2)),
)  # fmt: skip
SETS = {
    "plain": {},
    "slopes": {"arrays_of": ("alibi_slopes",), "causal": True},
    "mask": {"arrays_of": ("mask",)},
    "sink": {"arrays_of": ("sink",)},
}


def kept_and_raised(sign):
    """Return arrays for which warps keep most maxima and raise a few.

    Scores are up to 2.5 times the sign, of keys in no order that all differ.
    One row of 16 has others, which rise from 12 to 30 in the order of visits,
    so that its warp takes all its rows' maxima anew.
    """
    q, k, v, _ = inputs(KEPT)
    q, k = np.zeros_like(q), np.zeros_like(k)
    q[..., 0] = 1 + np.arange(130)[:, None] / 130
    order = np.random.default_rng(1).permutation(600).astype(np.uint16)
    all_unlike = (0x40A0 - order).view(k.dtype)  # 5, and 599 below
    k[..., 0] = sign * all_unlike[:, None]
    q[:, 3::16, :, :2] = 0, 24
    k[..., 1] = 5 - 3 * np.arange(600)[:, None] / 600
    return q, k, v


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", SETS)
def test_kept_maxima(backend, name, sign):
    case = replace(KEPT, **SETS[name])
    q, k, v = kept_and_raised(sign)
    out, lse, got = calls.forward(
        backend, case, q, k, v, return_max_score=True
    )
    want = expected.max_score(q, k, **case.meaning())
    assert_matches(got, want, "max_score", case)
    both = expected.forward(q, k, v, **case.meaning())
    assert_matches(out, both[0], "out", case)
    assert_matches(lse, both[1], "lse", case)


# Packed sequences, and calls ------------------------------------------------


@on_each_backend(strategies.packed_cases, archs=strategies.FAMILIES)
def test_packed(backend, case):
    (q, k, _, _), given = packed_inputs(case)
    *_, got = calls.forward(backend, case, *given[:3], return_max_score=True)
    for i, want in max_scores_of_sequences(q, k, case):
        assert_matches(got[None, :, i], want, "max_score", case)
    rest = slice(case.offsets[0][-1], None)
    assert_all(got[:, rest], -np.inf, "max_score[:, rest]", case)


@on_kernels
def test_bad_offsets_see_no_key(backend, monkeypatch):
    """As on a GPU, where only kernels read them."""
    monkeypatch.setattr(host_values, "offsets", lambda call: None)
    bad = (0, 90, 80)
    case = replace(PLAIN, batch=1, offsets=(bad, bad), on=HOPPER)
    _, given = packed_inputs(case)
    *_, got = calls.forward(backend, case, *given[:3], return_max_score=True)
    assert_all(got, -np.inf, "max_score", case)


@on_backends
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 0), (0, 5)])
def test_no_keys_and_no_queries(backend, seqlen_q, seqlen_k):
    case = replace(PLAIN, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    q, k, v, _ = inputs(case)
    *_, got = calls.forward(backend, case, q, k, v, return_max_score=True)
    assert got.shape == (2, 4, seqlen_q)
    assert_all(got, -np.inf, "max_score", case)


@pytest.mark.parametrize("asked", [1, None, "yes"])
def test_it_is_a_flag(asked):
    q, k, v, _ = inputs(PLAIN)
    with pytest.raises(DTypeError, match="return_max_score"):
        cuflash.forward(q, k, v, return_max_score=asked)


def with_table(score, b, h, q_idx, kv_idx, *, table):
    return score * table[h] - 0.1 * abs(q_idx - kv_idx) - 3


@on_backends
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_scores_of_users(backend, family):
    case = OF_FAMILY[family]
    q, k, v, _ = inputs(case)
    table = np.float32([1, -2, 3, 0.5])
    mods = {"score_mod": with_table, "mod_arrays": {"table": table}}
    placed = mods | {"mod_arrays": {"table": backend.place(table)}}
    *_, got = calls.forward(
        backend, case, q, k, v, return_max_score=True, **placed
    )
    s = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, 2), dtype=np.float64)
    i, j = np.ogrid[: case.seqlen_q, : case.seqlen_k]
    s = s * case.scale * table[:, None, None] - 0.1 * abs(i - j) - 3
    s = np.where(j <= i + case.seqlen_k - case.seqlen_q, s, -np.inf)
    # Sums of 40 products of up to 5^2, times 0.2 and 3, and 150 / 10: each
    # rounding is at most 2^-24 of 600.
    assert_within(got, s.max(axis=-1), 45 * 2.0**-24 * 600, "max_score", case)


@on_backends
def test_the_results_and_their_order(backend):
    q, k, v, _ = (backend.place(x[:1, :, :1]) for x in inputs(PLAIN))
    with backend.running(PLAIN):
        options = PLAIN.meaning() | {"return_max_score": True}
        out, lse, both = cuflash.forward(q, k, v, return_lse=True, **options)
        same, alone = cuflash.forward(q, k, v, **options)
        *_, of_head = cuflash.forward(
            q[0, :, 0], k[0, :, 0], v[0, :, 0], **options
        )
    assert type(both) is backend.array_type
    assert both.shape == lse.shape and both.dtype == lse.dtype
    assert_bitwise(backend.fetch(alone), backend.fetch(both), "alone")
    assert_bitwise(backend.fetch(same), backend.fetch(out), "out")
    assert_bitwise(backend.fetch(of_head), backend.fetch(both)[0, 0], "2-D")
