"""Attention over a cache, against attention of whole sequences."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuflash.reference.kvcache import (
    Addresses,
    dequantise,
    forward_kvcache,
    quantise,
)
from cuflash.reference.rotary import apply_rotary, tables
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_elements,
)
from helpers.kvcaches import CacheCase, cache_cases
from helpers.reference_cases import assert_close
from reference_strategies import windows


def call(case, caches, q=None, **options):
    """Call with the case's new tokens and lengths."""
    k_new, v_new = case.new()
    asked = {
        "cache_seqlens": np.array(case.before, np.int32),
        "k_new": k_new,
        "v_new": v_new,
        "causal": case.causal,
    }
    q = case.queries() if q is None else q
    return forward_kvcache(q, *caches, **{**asked, **options})


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert_arrays_equal(a, b, "a")


@given(cache_cases())
def test_a_call_is_attention_of_each_whole_sequence(case):
    out, lse = call(case, case.contiguous())
    for b in range(case.batch):
        want_out, want_lse, bound = case.alone(b)
        assert_close(out[b], want_out, bound.out)
        assert_close(lse[b], want_lse, bound.lse)


@given(st.integers(1, 6), st.integers(0, 2**32 - 2))
def test_decoding_is_the_rows_of_causal_attention(seqlen, seed):
    """Token by token, from an empty cache."""
    case = CacheCase((0,), seqlen, seqlen, causal=True, seed=seed)
    caches, q = case.contiguous(), case.queries()
    k, v = case.new()
    want_out, want_lse, bound = case.alone(0)
    for i in range(seqlen):
        one = slice(i, i + 1)
        new = {"k_new": k[:, one], "v_new": v[:, one]}
        out, lse = forward_kvcache(q[:, one], *caches, cache_seqlens=i, **new)
        assert_close(out[0], want_out[one], bound.out)
        assert_close(lse[0], want_lse[:, one], bound.lse)


@given(cache_cases())
def test_new_tokens_are_appended_and_nothing_else_is_written(case):
    before, caches = case.contiguous(), case.contiguous()
    call(case, caches)
    for i, (old, new) in enumerate(zip(before, caches, strict=True)):
        for b, n in enumerate(case.before):
            whole = case.sequences()[b][i]
            assert_arrays_equal(
                new[b, : len(whole)], whole, "new[b, : len(whole)]"
            )
            rest = old[b, n + case.seqlen_new :]
            assert_arrays_equal(
                new[b, len(whole) :], rest, "new[b, len(whole) :]"
            )


@given(cache_cases())
def test_pages_in_any_order_are_the_contiguous_cache(case):
    *caches, table = case.paged()
    expected = call(case, case.contiguous())
    assert_same(call(case, caches, page_table=table), expected)
    at = Addresses(case.page_size, np.arange(case.batch), table)
    for b, (k, v) in enumerate(case.sequences()):
        index = at.of(b, 0, len(k))
        assert_same([x[index] for x in caches], (k, v))


@given(cache_cases(), windows(6), st.sampled_from([None, 2.0]))
def test_every_option_means_what_it_means_in_attention(case, window, cap):
    rng = np.random.default_rng(case.seed)
    heads = case.num_heads_kv * case.group_size
    slopes, sink = rng.random((case.batch, heads)), rng.random(heads)
    options = {"window": window, "softcap": cap, "scale": 0.5, "sink": sink}
    got = call(case, case.contiguous(), alibi_slopes=slopes, **options)
    for b in range(case.batch):
        out, lse, _ = case.alone(b, alibi_slopes=slopes[b], **options)
        # Slopes and the sink are below 1, distances below 14.
        assert_allclose(got[0][b], out, "got[0][b]", atol=1e-13)
        assert_allclose(got[1][b], lse, "got[1][b]", atol=1e-13)


@given(cache_cases(), st.booleans(), windows(6))
def test_rotary_turns_keys_at_their_places(case, interleaved, window):
    cos, sin = tables(30, case.head_dim)
    rotary = {"rotary_cos": cos, "rotary_sin": sin,
              "rotary_interleaved": interleaved}  # fmt: skip
    got = call(case, case.contiguous(), window=window, **rotary)
    ordered = case.causal or window != (None, None)
    for b, n in enumerate(case.before):
        k, at = case.sequences()[b][0], np.arange(case.seqlen_q)
        new = apply_rotary(k[n:], cos, sin, np.arange(n, len(k)), interleaved)
        q = apply_rotary(case.queries()[b], cos, sin, n + at * ordered,
                         interleaved)  # fmt: skip
        k = np.concatenate([k[:n], new])
        out, lse, bound = case.alone(b, q, k, window=window)
        assert_close(got[0][b], out, bound.out)
        assert_close(got[1][b], lse, bound.lse)


def turned(x, positions, interleaved):
    """Rotate (tokens, heads, d) by complex numbers: angles as `tables` has."""
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else np.split(np.arange(x.shape[-1]), 2)
    )
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-np.arange(half) / half)
    angles = np.asarray(positions)[:, None, None] * theta
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    y = np.empty_like(x)
    y[..., first], y[..., second] = z.real, z.imag
    return y


def written_out(q, k, v, causal, window):
    """Attention of one head's tokens, (tokens, d), pair by pair."""
    out, lse = np.zeros((len(q), v.shape[-1])), np.full(len(q), -np.inf)
    left, right = (np.inf if x is None else x for x in window)
    for i, row in enumerate(q):
        at = len(k) - len(q) + i
        seen = [j for j in range(len(k)) if at - left <= j <= at + right
                and (j <= at or not causal)]  # fmt: skip
        weights = np.exp(k[seen] @ row / len(row) ** 0.5)
        if seen:
            out[i] = weights @ v[seen] / weights.sum()
            lse[i] = np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(None, None), (2, None), (None, 1), (None, 9), (2, 1), (0, 0)]
)
def test_rotary_with_each_kind_of_window(window, causal):
    """Ragged queries, more and fewer than new keys, written out.

    Scores are below 32 (|q|, |k| < 8, of 4 columns) and within some 32
    roundings of that: 2^-43; out is a mean of values below 8, off by twice
    that of 8, 2^-39.
    """
    case = CacheCase((0, 3, 5, 4), seqlen_new=2)
    counts, bound = (3, 1, 0, 4), 2.0**-39
    offsets, interleaved = np.cumsum([0, *counts]), window[1] == 1
    q = np.random.default_rng(5).standard_normal((sum(counts), 4, 4))
    cos, sin = tables(30, case.head_dim)
    out, lse = call(
        case, case.contiguous(), q, cu_seqlens_q=offsets, window=window,
        causal=causal, rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    one_by_one = causal or window != (None, None)
    for b, (n, count) in enumerate(zip(case.before, counts, strict=True)):
        own, (k, v) = slice(offsets[b], offsets[b + 1]), case.sequences()[b]
        places = n + np.arange(count) if one_by_one else np.full(count, n)
        rows = turned(q[own], places, interleaved)
        k[n:] = turned(k[n:], [n, n + 1], interleaved)
        for h in range(4):
            x = rows[:, h], k[:, h // 2], v[:, h // 2]
            want_out, want_lse = written_out(*x, causal, window)
            assert_allclose(out[own, h], want_out, f"out of {b}", atol=bound)
            assert_allclose(lse[h, own], want_lse, f"lse of {b}", atol=bound)


@given(cache_cases(), st.data())
def test_left_padding_is_a_shorter_sequence(case, data):
    pad = [data.draw(st.integers(0, n)) for n in case.before]
    got = call(case, case.contiguous(), cache_leftpad=np.array(pad))
    for b, (k, v) in enumerate(case.sequences()):
        caches = [x[None, pad[b] :].copy() for x in (k, v)]
        alone = forward_kvcache(case.queries()[b : b + 1], *caches,
                                causal=case.causal)  # fmt: skip
        assert_same([x[b : b + 1] for x in got], alone)


@given(cache_cases())
def test_any_slot_may_hold_a_sequence(case):
    slots = np.random.default_rng(case.seed).permutation(case.batch + 1)[:-1]
    caches = case.contiguous()
    expected = call(case, caches)
    moved = [np.full((case.batch + 1, *x.shape[1:]), np.nan) for x in caches]
    for target, source in zip(moved, case.contiguous(), strict=True):
        target[slots] = source
    assert_same(call(case, moved, cache_batch_idx=slots), expected)
    assert_same([x[slots] for x in moved], caches)


@given(cache_cases(), st.integers(0, 2))
def test_ragged_queries_are_separate_calls(case, unused):
    """k_new is packed like q; tokens past the last offset have no result."""
    lengths = np.random.default_rng(case.seed).integers(0, 4, case.batch)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    case = CacheCase((*case.before, sum(lengths) + unused), 4, 1)
    rng = np.random.default_rng(case.seed)
    q, k, v = (rng.standard_normal((offsets[-1] + unused, heads, d))
               for heads, d in ((4, 4), (2, 4), (2, 3)))  # fmt: skip
    together, apart = case.contiguous(), case.contiguous()
    out, lse = forward_kvcache(
        q, *together, cache_seqlens=np.array(case.before[:-1]),
        k_new=k, v_new=v, cu_seqlens_q=offsets, causal=True,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        i = slice(offsets[b], offsets[b] + n)
        alone = forward_kvcache(
            q[None, i], *(x[b : b + 1] for x in apart), k_new=k[None, i],
            v_new=v[None, i], cache_seqlens=case.before[b], causal=True,
        )  # fmt: skip
        assert_same((out[None, i], lse[None, :, i]), alone)
    assert_all(out[offsets[-1] :], 0, "out[offsets[-1] :]")
    assert_all(lse[:, offsets[-1] :], -np.inf, "lse[:, offsets[-1] :]")
    assert_same(together, apart)


def test_an_empty_sequence_has_no_result():
    case = CacheCase((0, 0), seqlen_new=0, spare=2)
    out, lse = call(case, case.contiguous())
    assert_all(out, 0, "out")
    assert_all(lse, -np.inf, "lse")
    sink = np.arange(4.0)
    out, lse = call(case, case.contiguous(), sink=sink)
    assert_all(out, 0, "out")
    assert_elements(lse, sink[:, None], "lse")


@given(cache_cases(), st.booleans())
def test_the_capacity_is_not_exceeded(case, by_pages):
    assume(case.seqlen_new)
    *caches, table = case.paged() if by_pages else (*case.contiguous(), None)
    rows = case.page_size * table.shape[1] if by_pages else case.capacity
    copies = [x.copy() for x in caches]
    lengths = np.array(case.before)
    lengths[-1] = rows - case.seqlen_new + 1
    with pytest.raises(ValueError, match=f"the cache holds {rows}"):
        call(case, caches, cache_seqlens=lengths, page_table=table)
    assert_same(caches, copies)


@pytest.mark.parametrize("bad", [-1, 2])
def test_slots_and_pages_outside_the_cache(bad):
    case = CacheCase()
    *paged, table = case.paged()
    table[1, 0] = bad if bad < 0 else len(paged[0])
    for caches, where in (
        (case.contiguous(), {"cache_batch_idx": np.array([0, bad])}),
        (paged, {"page_table": table}),
    ):
        copies = [x.copy() for x in caches]
        with pytest.raises(ValueError, match="sequence 1 is in"):
            call(case, caches, **where)
        assert_same(caches, copies)


def test_positions_outside_the_rotary_tables():
    case = CacheCase((0, 5))
    caches, copies = case.contiguous(), case.contiguous()
    cos, sin = tables(6, case.head_dim)
    with pytest.raises(IndexError):
        call(case, caches, rotary_cos=cos, rotary_sin=sin)
    assert_same(caches, copies)


@pytest.mark.parametrize("name", ["cache_seqlens", "cache_leftpad"])
def test_negative_lengths(name):
    case = CacheCase()
    with pytest.raises(ValueError, match="negative"):
        call(case, case.contiguous(), **{name: np.array([1, -1])})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"v_new": None}, "require each other"),
        ({"cache_seqlens": None}, "k_new requires cache_seqlens"),
        ({"k_new": None, "v_new": None, "rotary_cos": np.ones((9, 2))},
         "rotary_cos requires k_new"),
        ({"page_table": np.zeros((2, 9), int),
          "cache_leftpad": np.zeros(2, int)}, "pages exclude"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(options, words):
    case = CacheCase()
    with pytest.raises(ValueError, match=words):
        call(case, case.contiguous(), **options)


# float8 caches -------------------------------------------------------------

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@given(cache_cases(), st.booleans())
def test_a_float8_cache_is_its_dequantised_values(case, each_page):
    rng = np.random.default_rng(case.seed)
    *caches, table = case.paged()
    lead = (len(caches[0]),) if each_page else ()
    scales = [2.0 ** rng.integers(-6, 0, (*lead, case.num_heads_kv))
              for _ in caches]  # fmt: skip
    wide = [np.expand_dims(x, 1) if each_page else x for x in scales]
    stored = [quantise(x, s, FLOAT8)
              for x, s in zip(caches, wide, strict=True)]  # fmt: skip
    keys = {"k_scale": scales[0], "v_scale": scales[1], "page_table": table}
    got = call(case, stored, **keys)
    values = [dequantise(x, s) for x, s in zip(stored, wide, strict=True)]
    lengths = np.add(case.before, case.seqlen_new)
    expected = forward_kvcache(
        case.queries(), *values, page_table=table, cache_seqlens=lengths,
        causal=case.causal,
    )  # fmt: skip
    assert_same(got, expected)


def test_new_values_saturate_under_the_scale():
    scale = np.array([0.5, 2.0])
    values = np.array([[1e3, -1e3, np.inf, np.nan, 1.0]] * 2)
    got = dequantise(quantise(values, scale, FLOAT8), scale)
    assert_arrays_equal(
        got, [[224, -224, 224, np.nan, 1], [896, -896, 896, np.nan, 1]], "got"
    )
