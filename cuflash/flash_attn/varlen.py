"""Attention over packed sequences, and over pages of keys and values."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import DTypeError, UnsupportedError
from cuflash.flash_attn import arguments, value_queries
from cuflash.torch import attention, forward_kvcache


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    **hopper: Any,
) -> Any:
    """Attention over sequences that are stored end to end.

    Parameters
    ----------
    q : Tensor, (total_q, nheads, headdim)
    k, v : Tensor, (total_k, nheads_k, headdim)
        With `block_table`, (num_blocks, page_block_size, nheads_k, headdim).
    cu_seqlens_q, cu_seqlens_k : Tensor, (batch + 1,)
        Integers: the offset of each sequence's first token, then the end of
        the last. With `block_table`, the differences of `cu_seqlens_k` are
        the lengths of the sequences.
    max_seqlen_q, max_seqlen_k : int
        The length of the longest sequence, or more; offsets of a longer
        sequence are invalid, see `cuflash.forward`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`, in each sequence; slopes are (nheads,) or
        (batch, nheads).
    deterministic, return_attn_probs
        As in `flash_attn_func`.
    block_table : Tensor, (batch, max_num_blocks), optional
        Integers: the pages of each sequence, in order. Then there is no
        dropout, and a backward pass raises.
    **hopper
        Keywords of FlashAttention-3, as in `flash_attn_func`. `page_table` is
        `block_table`. `seqused_k`, (batch,): how many of its keys each
        sequence uses, from the first on; without pages, k and v are copied.
        With pages and `seqused_k`, `cu_seqlens_k` may be None.

    Returns
    -------
    out : Tensor, (total_q, nheads, headdim)
    lse : Tensor, (nheads, total_q)
        Only on request; see `flash_attn_func`.

    Raises
    ------
    CuflashError
        As `flash_attn_func`.

    Examples
    --------
    >>> import torch
    >>> from cuflash.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 7, 4, 8)
    >>> offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 4, 4).shape
    torch.Size([7, 4, 8])
    """
    used = arguments.hopper(
        "flash_attn_varlen_func",
        hopper,
        "num_splits",
        "page_table",
        "qv",
        "return_softmax_lse",
        "seqused_k",
    )
    wants_lse = used.get("return_softmax_lse", False)
    pages = arguments.one_of(
        "block_table", block_table, "page_table", used.get("page_table")
    )
    options = {
        **arguments.masks_and_scores(
            softmax_scale, causal, window_size, alibi_slopes, softcap=softcap
        ),
        "cu_seqlens_q": _offsets("cu_seqlens_q", cu_seqlens_q),
        "max_seqlen_q": arguments.number("max_seqlen_q", max_seqlen_q),
        "return_lse": return_attn_probs or wants_lse,
    }
    arguments.tensor("q", q, arguments.PACKED)
    if (qv := used.get("qv")) is not None:
        arguments.tensor("qv", qv, arguments.PACKED)
    seqused_k = used.get("seqused_k")
    if seqused_k is not None:
        arguments.one_each("seqused_k", seqused_k, cu_seqlens_q.shape[0] - 1)
    dropout = arguments.dropout(dropout_p, return_attn_probs)
    keys = k, v, cu_seqlens_k, seqused_k
    if pages is None:
        options |= dropout
        options["max_seqlen_k"] = arguments.number(
            "max_seqlen_k", max_seqlen_k
        )
        options["deterministic"] = deterministic
        out = _over_tokens(q, qv, *keys, **options)
    elif dropout:
        raise UnsupportedError(
            f"dropout_p is {dropout_p} with block_table, expected 0: pages "
            "are for inference"
        )
    else:
        options["num_splits"] = used.get("num_splits") or None
        out = _over_pages(q, qv, *keys, page_table=pages, **options)
    return arguments.results(out, return_attn_probs, wants_lse)


def _offsets(name: str, given: Any) -> Any:
    if given is None:
        raise DTypeError(
            f"{name} is None, expected a tensor of integers: the offset of "
            "each sequence's first token, then the end of the last"
        )
    return arguments.tensor(name, given, "(batch + 1)")


def _over_tokens(
    q: Any,
    qv: Any,
    k: Any,
    v: Any,
    cu_seqlens_k: Any,
    used: Any,
    **options: Any,
) -> Any:
    """Attention of packed queries over packed keys, of which some are used."""
    arguments.tensor("k", k, arguments.PACKED)
    arguments.tensor("v", v, arguments.PACKED)
    offsets = _offsets("cu_seqlens_k", cu_seqlens_k)
    if used is not None:
        offsets, token = _used_tokens(offsets, used, k.shape[0])
        k, v = k.index_select(0, token), v.index_select(0, token)
    if qv is not None:
        q, k = value_queries.concatenated(q, k, qv, v)
    return attention(q, k, v, cu_seqlens_k=offsets, **options)


def _over_pages(
    q: Any,
    qv: Any,
    k: Any,
    v: Any,
    cu_seqlens_k: Any,
    used: Any,
    **options: Any,
) -> Any:
    """Attention of packed queries over the pages of each sequence."""
    arguments.tensor("k", k, arguments.PAGES)
    arguments.tensor("v", v, arguments.PAGES)
    if used is None:
        offsets = _offsets("cu_seqlens_k", cu_seqlens_k)
        used = offsets[1:] - offsets[:-1]
    options["cache_seqlens"] = used
    if qv is not None:
        return value_queries.over_caches(q, k, v, qv, **options)
    return forward_kvcache(q, k, v, **options)


def _used_tokens(offsets: Any, used: Any, total: int) -> tuple[Any, Any]:
    """Offsets of the used tokens, and the index of each in the whole.

    There are as many indices as tokens, so that no size depends on data and
    the host need not wait; those past the last offset belong to no sequence.
    """
    ends = torch.cumsum(used, 0, dtype=torch.int32)
    new = torch.nn.functional.pad(ends, (1, 0))
    token = torch.arange(total, device=used.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, token, right=True)
    sequence = sequence.clamp(max=used.shape[0] - 1)
    index = offsets[sequence] + token - new[sequence]
    return new, index.clamp(0, total - 1)


@arguments.takes_options_of(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **hopper: Any,
) -> Any:
    """`flash_attn_varlen_func` of `k` and `v` in one tensor.

    Parameters
    ----------
    q : Tensor, (total_q, nheads, headdim)
    kv : Tensor, (total_k, 2, nheads_k, headdim)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in `flash_attn_varlen_func`.
    *options, **hopper
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out, lse
        As `flash_attn_varlen_func`.
    """
    k, v = arguments.parts("kv", kv, "(total, 2, nheads, headdim)", "2")
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *sequences, *options, **hopper)


@arguments.takes_options_of(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, *options: Any, **hopper: Any
) -> Any:
    """`flash_attn_varlen_func` of `q`, `k` and `v` in one tensor.

    Parameters
    ----------
    qkv : Tensor, (total, 3, nheads, headdim)
    cu_seqlens, max_seqlen
        As those of queries and of keys in `flash_attn_varlen_func`.
    *options, **hopper
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out, lse
        As `flash_attn_varlen_func`.
    """
    q, k, v = arguments.parts("qkv", qkv, "(total, 3, nheads, headdim)", "3")
    sequences = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *sequences, *options, **hopper)
