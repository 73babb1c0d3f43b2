"""Attention over sequences of one length each for queries and keys."""

from __future__ import annotations

from typing import Any

from cuflash.flash_attn import arguments, value_queries
from cuflash.torch import attention


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **hopper: Any,
) -> Any:
    """Attention, differentiable in `q`, `k` and `v`.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, nheads, headdim)
        Queries: float16, bfloat16, float32 or float64, on a CUDA device or
        the CPU. **Always 4-D: 3-D and 2-D tensors are refused**.
    k, v : Tensor, (batch, seqlen_k, nheads_k, headdim)
        Keys and values. `nheads` is a multiple of `nheads_k`. The headdim of
        `v` may differ.
    dropout_p : float, optional
        The probability with which a weight is set to 0.
    softmax_scale : float, optional
        Multiplies Q K^T; ``headdim ** -0.5`` by default.
    causal : bool, optional
        Whether query i sees only the keys ``j <= i + seqlen_k - seqlen_q``.
    window_size : (left, right), optional
        Query i sees only the keys from ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``, both included; -1 means no bound.
        It may be a CPU tensor.
    softcap : float, optional
        If above 0, scaled scores s become ``softcap * tanh(s / softcap)``.
    alibi_slopes : Tensor, (nheads,) or (batch, nheads), optional
        float32. ``slope * abs(i + seqlen_k - seqlen_q - j)`` is subtracted
        from the score of query i and key j.
    deterministic : bool, optional
        Whether the gradient of `q` is bitwise reproducible; everything else
        is.
    return_attn_probs : bool, optional
        Whether to return ``(out, lse, None)``. Not with dropout.
    **hopper
        Keywords of FlashAttention-3. ``return_softmax_lse=True`` returns
        ``(out, lse)``; `num_splits` as in `cuflash.forward`, with 0 for the
        default; `pack_gqa` and `sm_margin` have no effect. `qv`, (batch,
        seqlen_q, nheads, headdim of v): scores are Q K^T + Qv V^T, and the
        default softmax_scale counts the columns of both; copies k and v.
        Others are refused unless they have their default.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, nheads, headdim)
        A query that sees no key has out 0.
    lse : Tensor, (batch, nheads, seqlen_q)
        Only on request. The logsumexp of each row of scores, differentiable;
        -inf for a query that sees no key.

    Raises
    ------
    CuflashError
        As `cuflash.torch.attention`.
    UnsupportedError
        Also for `return_attn_probs` with dropout, and for keywords that are
        not offered.

    Examples
    --------
    >>> import torch
    >>> from cuflash.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8)
    >>> out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 16]))
    """
    used = arguments.hopper(
        "flash_attn_func", hopper, "num_splits", "qv", "return_softmax_lse"
    )
    arguments.tensor("q", q, arguments.ROWS)
    arguments.tensor("k", k, arguments.ROWS)
    arguments.tensor("v", v, arguments.ROWS)
    if (qv := used.get("qv")) is not None:
        arguments.tensor("qv", qv, arguments.ROWS)
        q, k = value_queries.concatenated(q, k, qv, v)
    splits = used.get("num_splits")
    wants_lse = used.get("return_softmax_lse", False)
    out = attention(
        q,
        k,
        v,
        **arguments.masks_and_scores(
            softmax_scale, causal, window_size, alibi_slopes, softcap=softcap
        ),
        **arguments.dropout(dropout_p, return_attn_probs),
        num_splits=splits or None,
        deterministic=deterministic,
        return_lse=return_attn_probs or wants_lse,
    )
    return arguments.results(out, return_attn_probs, wants_lse)


@arguments.takes_options_of(flash_attn_func)
def flash_attn_kvpacked_func(
    q: Any, kv: Any, *options: Any, **hopper: Any
) -> Any:
    """`flash_attn_func` of `k` and `v` in one tensor.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, nheads, headdim)
    kv : Tensor, (batch, seqlen_k, 2, nheads_k, headdim)
        It is read in place; its gradient is stacked, which is a copy.
    *options, **hopper
        As in `flash_attn_func`.

    Returns
    -------
    out, lse
        As `flash_attn_func`.
    """
    k, v = arguments.parts(
        "kv", kv, "(batch, seqlen, 2, nheads, headdim)", "2"
    )
    return flash_attn_func(q, k, v, *options, **hopper)


@arguments.takes_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Any, *options: Any, **hopper: Any) -> Any:
    """`flash_attn_func` of `q`, `k` and `v` in one tensor.

    Parameters
    ----------
    qkv : Tensor, (batch, seqlen, 3, nheads, headdim)
        It is read in place; its gradient is stacked, which is a copy. With
        the keyword `num_heads_q` of FlashAttention-3, (batch, seqlen, nheads
        + 2 * nheads_k, headdim).
    *options, **hopper
        As in `flash_attn_func`.

    Returns
    -------
    out, lse
        As `flash_attn_func`.
    """
    q, k, v = arguments.heads(qkv, hopper.pop("num_heads_q", None))
    return flash_attn_func(q, k, v, *options, **hopper)
