"""The attention function of Hugging Face Transformers models."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from cuflash.errors import UnsupportedError

from .attention import attention
from .masks import Mask

_logger = logging.get_logger("cuflash.torch")

# Arguments of paged caches, which continuous batching passes.
_PAGED = ("block_table", "k_cache", "v_cache")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it, with heads before tokens.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v)
    None
        The weights, which cuflash never has.
    """
    if kwargs.get("output_attentions"):
        _logger.warning_once(
            "cuflash returns no attention weights: set attn_implementation "
            "to eager for output_attentions=True"
        )
    for name in _PAGED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name} is given by continuous batching, which cuflash's "
                "attention function does not support: use model.generate, or "
                "cuflash.torch.forward_kvcache with a page_table"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not q.dtype == k.dtype == v.dtype:  # float32 norms of some models
        q, k = q.to(v.dtype), k.to(v.dtype)
    options: dict[str, Any] = {"scale": scaling, "dropout": dropout}
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        options["sink"] = s_aux.to(wide)
    if position_bias is not None:
        options["bias"] = _addend(position_bias, q)
    if all(kwargs.get(name) is not None for name in _PACKED):
        return _packed(q, k, v, is_causal, sliding_window, options, kwargs)
    if isinstance(attention_mask, Mask):
        num_keys = attention_mask.num_keys
        k, v = k[:, :num_keys], v[:, :num_keys]
        if "bias" in options and options["bias"].shape[-1] > 1:
            options["bias"] = options["bias"][..., :num_keys]
        options["causal"] = attention_mask.causal
        options["window"] = attention_mask.window
        options["segment_ids_q"] = attention_mask.ids_q
        options["segment_ids_k"] = attention_mask.ids_k
    elif attention_mask is None:
        options["causal"] = is_causal
        options["window"] = _window(sliding_window, is_causal)
    else:
        _add_mask(attention_mask, q, k, is_causal, sliding_window, options)
    return attention(q, k, v, **options), None


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Sequences end to end, told apart by cu_seq_lens_q and cu_seq_lens_k."""
    for x in "qk":
        ends = kwargs[f"cu_seq_lens_{x}"]
        options[f"cu_seqlens_{x}"] = ends.to(torch.int32)
        longest = kwargs.get(f"max_length_{x}")
        if isinstance(longest, int):  # a tensor may be on a GPU: not read
            options[f"max_seqlen_{x}"] = longest
    out = attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        causal=is_causal,
        window=_window(sliding_window, is_causal),
        **options,
    )
    return out.view(*q.shape[:2], *out.shape[1:]), None


def _window(size: int | None, causal: bool) -> Any:
    """A window of so many keys, the query's own among them."""
    if size is None:
        return None
    return (size - 1, None if causal else size - 1)


def _add_mask(
    mask: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
) -> None:
    """Add a tensor: what a query sees, numbers to add, or tokens."""
    if mask.ndim == 2:  # (batch, seqlen_k), as flash-attention takes it
        options["causal"] = is_causal
        options["window"] = _window(sliding_window, is_causal)
        tokens = mask[:, : k.shape[1]].to(torch.int32)
        options["segment_ids_k"] = tokens
        options["segment_ids_q"] = tokens.new_ones(q.shape[:2])
        return
    mask = mask[..., : k.shape[1]]
    if mask.dtype is torch.bool:
        options["mask"] = mask
    elif "bias" in options:
        options["bias"] = options["bias"] + _addend(mask, q)
    else:
        options["bias"] = _addend(mask, q)


def _addend(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Numbers to add to scores, in a dtype that a bias may have."""
    if x.dtype is torch.float32 and q.dtype is not torch.float64:
        return x
    return x.to(q.dtype)
