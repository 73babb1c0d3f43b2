"""flash_attn_with_kvcache against the oracle."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import (  # noqa: E402
    assert_close,
    int32,
    normal,
    offsets,
    packed_qkv,
    qkv,
    slopes,
)
from flash_attn_oracle import rotated, sequence, tolerance  # noqa: E402

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.flash_attn import flash_attn_with_kvcache  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

CAPACITY, LENGTHS, NEW = 12, (3, 7), 2
CACHED = int32(*LENGTHS)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (2, 0), "softcap": 2.0},
    "slopes of each sequence": {"alibi_slopes": slopes(2, 4)},
}


def new_tokens(heads=4, seqlen=NEW):
    """q, k and v of new tokens."""
    return qkv(seqlen, seqlen, heads=heads)


def caches(rows=2, seed=6):
    """k_cache and v_cache; every row holds numbers."""
    shape = (rows, CAPACITY, 2, 8)
    return normal(*shape, seed=seed), normal(*shape, seed=seed + 1)


def grown(cache, length, new, first=0):
    """The tokens of a sequence after the call."""
    return torch.cat([cache[first:length], new])


def expect(q, k, v, kept, first=(0, 0), alibi_slopes=None, **options):
    """Out and lse; `kept` are the caches' rows of each sequence."""
    slopes = [None, None] if alibi_slopes is None else alibi_slopes
    each = [
        sequence(
            q[b],
            grown(kept[0][b], LENGTHS[b], k[b], first[b]),
            grown(kept[1][b], LENGTHS[b], v[b], first[b]),
            alibi_slopes=slopes[b],
            **options,
        )
        for b in range(2)
    ]
    return map(torch.stack, zip(*each, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_new_tokens_are_appended_and_seen(options):
    (q, k, v), kept = new_tokens(), caches()
    want_out, want_lse = expect(q, k, v, caches(), **options)
    out, lse = flash_attn_with_kvcache(
        q, *kept, k, v, cache_seqlens=CACHED, **options,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_close(out, want_out, tolerance(q, kept[0], v, CAPACITY))
    assert_close(lse, want_lse, tolerance(q, kept[0], v, CAPACITY))


def test_only_the_rows_of_new_tokens_change():
    (_, k, v), kept = new_tokens(), caches()
    before = caches()
    flash_attn_with_kvcache(k, *kept, k, v, cache_seqlens=CACHED)
    for cache, old, new in zip(kept, before, (k, v), strict=True):
        for b, n in enumerate(LENGTHS):
            old[b, n : n + NEW] = new[b]
        assert_arrays_equal(cache, old, "cache")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotation(causal, interleaved):
    """Without a mask all queries are at position cache_seqlens."""
    (q, k, v), kept = new_tokens(), caches()
    cos, sin = (f(normal(CAPACITY, 3)) for f in (torch.cos, torch.sin))
    out = flash_attn_with_kvcache(
        q, *kept, k, v, cos, sin, CACHED, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    turned_q, turned_k = q.clone(), k.clone()
    for b, n in enumerate(LENGTHS):
        turned_k[b] = rotated(k[b], cos, sin, n, interleaved)
        for i in range(NEW):
            m = n + i * causal
            turned_q[b, i : i + 1] = rotated(
                q[b, i : i + 1], cos, sin, m, interleaved
            )
    want, _ = expect(turned_q, turned_k, v, caches(), causal=causal)
    assert_close(out, want, tolerance(q, kept[0], v))


def test_rotation_interleaves_by_default():
    q, k, v = new_tokens()
    cos, sin = normal(CAPACITY, 4), normal(CAPACITY, 4, seed=1)
    given = (k, v, cos, sin, CACHED)
    outs = [
        flash_attn_with_kvcache(q, *caches(), *given, **options)
        for options in ({}, {"rotary_interleaved": True})
    ]
    assert_arrays_equal(*outs, "out")


def test_rows_of_the_caches_by_index():
    (q, k, v), kept = new_tokens(), caches(rows=5)
    index = int32(4, 1)
    out = flash_attn_with_kvcache(
        q, *kept, k, v, cache_seqlens=CACHED, cache_batch_idx=index
    )
    before = [x[index] for x in caches(rows=5)]
    want, _ = expect(q, k, v, before)
    assert_close(out, want, tolerance(q, kept[0], v))
    assert_arrays_equal(kept[0][4, 3:5], k[0], "kept[0][4, 3:5]")


def test_tokens_at_the_left_are_not_seen():
    (q, k, v), kept = new_tokens(), caches()
    out = flash_attn_with_kvcache(
        q, *kept, k, v, cache_seqlens=CACHED, cache_leftpad=int32(2, 5),
        causal=True,
    )  # fmt: skip
    want, _ = expect(q, k, v, caches(), first=(2, 5), causal=True)
    assert_close(out, want, tolerance(q, kept[0], v))


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_pages(name):
    """A contiguous cache in pages of 4, of which three are a sequence's."""
    (q, k, v), kept = new_tokens(), caches()
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pages = [torch.zeros(6, 4, 2, 8, dtype=torch.float64) for _ in kept]
    for page, cache in zip(pages, kept, strict=True):
        page[table.flatten().long()] = cache.reshape(6, 4, 2, 8)
    given = {"cache_seqlens": CACHED, "causal": True}
    out = flash_attn_with_kvcache(q, *pages, k, v, **given, **{name: table})
    want = flash_attn_with_kvcache(q, *kept, k, v, **given)
    assert_arrays_equal(out, want, "out")
    for page, cache in zip(pages, kept, strict=True):
        assert_arrays_equal(
            page[table.flatten().long()].view_as(cache), cache, "cache"
        )


def test_lengths_as_an_int_and_as_none():
    (q, _, _), kept = new_tokens(), caches()
    by_int = flash_attn_with_kvcache(q, *kept, cache_seqlens=5)
    by_tensor = flash_attn_with_kvcache(q, *kept, cache_seqlens=int32(5, 5))
    whole = flash_attn_with_kvcache(q, *kept)
    full = flash_attn_with_kvcache(q, *kept, cache_seqlens=CAPACITY)
    assert_arrays_equal(by_int, by_tensor, "by_int")
    assert_arrays_equal(whole, full, "whole")


def test_packed_queries():
    """FlashAttention-3: queries of several lengths, and new keys alike."""
    q, k, v = packed_qkv(3, 3)
    cu_seqlens, kept = offsets([1, 2]), caches()
    out, lse = flash_attn_with_kvcache(
        q, *kept, k, v, cache_seqlens=CACHED, causal=True,
        cu_seqlens_q=cu_seqlens, cu_seqlens_k_new=cu_seqlens, max_seqlen_q=2,
        return_softmax_lse=True, pack_gqa=False, sm_margin=0,
    )  # fmt: skip
    before = caches()
    for b, tokens in enumerate((slice(0, 1), slice(1, 3))):
        keys, values = (
            grown(x[b], LENGTHS[b], new[tokens])
            for x, new in zip(before, (k, v), strict=True)
        )
        want = sequence(q[tokens], keys, values, causal=True)
        assert_close(out[tokens], want[0], tolerance(q, before[0], v))
        assert_close(lse[:, tokens], want[1], tolerance(q, before[0], v))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits_change_nothing_but_rounding(num_splits):
    (q, _, _), kept = new_tokens(), caches()
    out = flash_attn_with_kvcache(
        q, *kept, cache_seqlens=CACHED, num_splits=num_splits
    )
    want = flash_attn_with_kvcache(q, *kept, cache_seqlens=CACHED)
    assert_close(out, want, tolerance(q, *kept))


def test_backward_raises():
    (q, _, _), kept = new_tokens(), caches()
    want = flash_attn_with_kvcache(q, *kept)
    q.requires_grad_()
    out = flash_attn_with_kvcache(q, *kept)
    assert_arrays_equal(out, want, "out")
    with pytest.raises(UnsupportedError, match="no gradients, but q require"):
        out.sum().backward()
    with torch.no_grad():
        assert not flash_attn_with_kvcache(q, *kept).requires_grad
