"""Attention over a cache of keys and values, to which it may append."""

from __future__ import annotations

from typing import Any

from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.flash_attn import arguments, value_queries
from cuflash.torch import forward_kvcache


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **hopper: Any,
) -> Any:
    """Append `k` and `v` to the caches in place, then attend to them.

    There are no gradients: inputs may require grad, but a backward pass that
    comes to this call raises.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, nheads, headdim)
    k_cache, v_cache : Tensor, (batch_cache, seqlen_cache, nheads_k, headdim)
        With `block_table`, (num_blocks, page_block_size, nheads_k, headdim);
        pages may have any size.
    k, v : Tensor, (batch, seqlen_new, nheads_k, headdim), optional
        New tokens, written to the caches from `cache_seqlens` on.
    rotary_cos, rotary_sin : Tensor, (seqlen_ro, rotary_dim / 2), optional
        Rotate `q` and `k`, which they require. Keys are at the positions
        `cache_seqlens`, + 1, and so on. So are queries if `causal` or
        `window_size` is given; otherwise all are at `cache_seqlens`.
    cache_seqlens : int or Tensor, (batch,), optional
        Integers: the tokens of each sequence before the call, counted from the
        start of the cache; its capacity by default.
    cache_batch_idx : Tensor, (batch,), optional
        Integers: the row of the caches of each sequence. Not with
        `block_table`.
    cache_leftpad : Tensor, (batch,), optional
        Integers: how many tokens at the start are not visible. Not with
        `block_table`.
    block_table : Tensor, (batch, max_num_blocks), optional
        Integers: the pages of each sequence, in order.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, with seqlen_k the length after appending.
    rotary_interleaved : bool, optional
        Whether pair i is the columns (2i, 2i + 1), else
        (i, i + rotary_dim / 2).
    num_splits : int, optional
        Into how many parts the keys of a head are cut; 0 for the fastest.
    return_softmax_lse : bool, optional
        Whether to return lse too.
    **hopper
        Keywords of FlashAttention-3, as in `flash_attn_func`. `page_table`
        is `block_table`. `qv`, like `q` with the headdim of `v_cache`: scores
        are Q K^T + Qv V^T. The caches are then copied, unless they are views
        of rows that hold a value and after it its key, as of latent
        attention: ``v_cache = rows[..., :512], k_cache = rows[..., 512:]``.
        With `cu_seqlens_q`, and `max_seqlen_q` if known,
        `q` is packed, (total_q, nheads, headdim); `k` and `v` may be packed
        alike, with `cu_seqlens_k_new` the same tensor.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, nheads, headdim)
        Packed like `q`.
    lse : Tensor, (batch, nheads, seqlen_q)
        Only with `return_softmax_lse`; (nheads, total_q) for a packed `q`.

    Raises
    ------
    CuflashError
        As `cuflash.torch.forward_kvcache`; its `k_new`, `v_new` and
        `page_table` are `k`, `v` and `block_table` here.

    Examples
    --------
    >>> import torch
    >>> from cuflash.flash_attn import flash_attn_with_kvcache
    >>> q, k, v = torch.randn(3, 1, 1, 4, 8)
    >>> k_cache, v_cache = torch.zeros(2, 1, 32, 4, 8)
    >>> out = flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=5
    ... )
    >>> torch.equal(k_cache[:, 5:6], k)
    True
    """
    used = arguments.hopper(
        "flash_attn_with_kvcache",
        hopper,
        "cu_seqlens_k_new",
        "cu_seqlens_q",
        "max_seqlen_q",
        "page_table",
        "qv",
    )
    pages = arguments.one_of(
        "block_table", block_table, "page_table", used.get("page_table")
    )
    offsets = used.get("cu_seqlens_q")
    _check_new(k, v, cache_seqlens, rotary_cos, used)
    rows, packed, paged = arguments.ROWS, arguments.PACKED, arguments.PAGES
    arguments.tensor("q", q, rows if offsets is None else packed)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        arguments.tensor(name, cache, rows if pages is None else paged)
    options = arguments.masks_and_scores(
        softmax_scale, causal, window_size, alibi_slopes, softcap=softcap
    )
    given = {
        "k_new": k,
        "v_new": v,
        "cache_seqlens": cache_seqlens,
        "page_table": pages,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "cu_seqlens_q": offsets,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
    }
    options |= {name: x for name, x in given.items() if x is not None}
    if "max_seqlen_q" in used:
        longest = arguments.number("max_seqlen_q", used["max_seqlen_q"])
        options["max_seqlen_q"] = longest
    options |= {
        "rotary_interleaved": rotary_interleaved,
        "num_splits": num_splits or None,
        "return_lse": return_softmax_lse,
    }
    if (qv := used.get("qv")) is not None:
        arguments.tensor("qv", qv, rows if offsets is None else packed)
        return value_queries.over_caches(
            q, k_cache, v_cache, qv, offsets, **options
        )
    return forward_kvcache(q, k_cache, v_cache, **options)


def _check_new(
    k: Any, v: Any, cache_seqlens: Any, rotary_cos: Any, used: dict[str, Any]
) -> None:
    """Check what new tokens require, in flash-attn's names."""
    given, other = ("k", "v") if v is None else ("v", "k")
    if (k is None) != (v is None):
        raise ValueRangeError(
            f"{given} is given without {other}, expected {other} too: a "
            "token has a key and a value"
        )
    if k is not None and cache_seqlens is None:
        raise ValueRangeError(
            "k is given without cache_seqlens, expected cache_seqlens too: "
            "new tokens are appended there"
        )
    if rotary_cos is not None and k is None:
        raise ValueRangeError(
            "rotary_cos is given without k, expected k and v too: keys are "
            "rotated when they are appended"
        )
    offsets = used.get("cu_seqlens_k_new")
    if offsets is not None and offsets is not used.get("cu_seqlens_q"):
        raise UnsupportedError(
            "cu_seqlens_k_new is not the tensor cu_seqlens_q, expected the "
            "same one: new keys are packed like the queries"
        )
