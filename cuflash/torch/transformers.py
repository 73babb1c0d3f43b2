"""The attention function of Hugging Face Transformers models."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import ShapeError, UnsupportedError

from . import returned_weights
from .attention import attention
from .chosen_keys import chosen_blocks, chosen_keys
from .masks import Mask

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
# Of continuous batching: its pages, and where the tokens of a batch are.
_PAGED = ("block_table", "k_cache", "v_cache", "read_index", "write_index")

# Keywords of models that change no output here, by the reason.
_HARMLESS = {
    "embeddings and the mask have used them": {
        *("position_ids", "position_embeddings", "cache_position"),
        *("input_ids", "inputs_embeds", "token_type_ids", "grid_thw"),
        *("decoder_input_ids", "decoder_inputs_embeds", "encoder_outputs"),
        *("decoder_attention_mask", "decoder_position_ids"),
        *("mm_token_type_ids", "cross_attention_mask"),
    },
    "key and value hold what the cache has": {
        *("cache", "past_key_values", "cache_params", "use_cache"),
    },
    "they choose what the model returns": {
        *("output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "labels", "logits_to_keep"),
        "output_attentions",  # answered by the weights
    },
    "other layers read them": {"seq_idx", "full_text_row_masked_out_mask"},
    "they count together": {*_PACKED, "max_length_q", "max_length_k"},
}
_KNOWN = frozenset().union(*_HARMLESS.values())


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
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as Transformers calls it, with heads before tokens.

    The mask alone says what a query sees, as in Transformers' "eager":
    `sliding_window` counts only beside ``cu_seq_lens_q`` without a mask, and
    beside a mask of tokens.

    Parameters
    ----------
    s_aux : Tensor, (heads,), optional
        The sink of a head.
    sinks : Tensor, (batch, heads, seqlen_q, 1), optional
        The sink of a query.
    indices : Tensor, (batch, seqlen_q, n), optional
        The keys that a query sees, of those that the mask shows.
    block_indices : Tensor, (batch, index_heads, seqlen_q, n), optional
        Likewise, blocks of ``module.indexer.block_size`` keys for each group
        of heads; below 0 is none.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v)
    weights : Tensor, (batch, heads, seqlen_q, seqlen_k), or None
        Only with ``output_attentions=True``, in the dtype of `query`: those
        before dropout.

    Raises
    ------
    ShapeError
        If the mask is not as wide as there are keys.
    UnsupportedError
        For a keyword that is not known here, and for weights that take more
        than `returned_weights.MOST_BYTES`.
    """
    _refuse_unknown(module, kwargs)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not q.dtype == k.dtype == v.dtype:  # float32 norms of some models
        q, k = q.to(v.dtype), k.to(v.dtype)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    wanted = bool(kwargs.get("output_attentions"))
    width = k.shape[1]
    if wanted:
        returned_weights.check_size(q, width)
    options: dict[str, Any] = {"scale": scaling, "dropout": dropout}
    if deterministic:
        options["deterministic"] = True
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sink"] = s_aux.to(wide)
    if position_bias is not None:
        options["bias"] = _addend(position_bias, q)
    chosen = None
    if indices is not None:
        chosen = chosen_keys(indices, k.shape[1])
    if block_indices is not None:
        size = module.indexer.block_size
        chosen = chosen_blocks(block_indices, size, q.shape[2], k.shape[1])
        if _is_additive(attention_mask):
            attention_mask = attention_mask == 0  # as MiniMax's "eager" does
    packed = all(kwargs.get(name) is not None for name in _PACKED)
    # Beside an unknown pattern, lengths say too little.
    packed &= attention_mask is None or isinstance(attention_mask, Mask)
    if packed and chosen is None and sinks is None:
        return _packed(
            q, k, v, attention_mask, is_causal, sliding_window, options, kwargs
        )
    if isinstance(attention_mask, Mask):
        _check_width(attention_mask, k)
        num_keys = attention_mask.num_keys  # a static cache has more
        k, v = k[:, :num_keys], v[:, :num_keys]
        if "bias" in options and options["bias"].shape[-1] > 1:
            options["bias"] = options["bias"][..., :num_keys]
        options["causal"] = attention_mask.causal
        options["window"] = attention_mask.window
        options["segment_ids_q"] = attention_mask.ids_q
        options["segment_ids_k"] = attention_mask.ids_k
    elif attention_mask is None:
        options["causal"] = is_causal
    else:
        _check_width(attention_mask, k)
        _add_mask(attention_mask, q, is_causal, sliding_window, options)
    if chosen is not None:
        chosen = chosen[..., : k.shape[1]]
        shown = options.get("mask")
        options["mask"] = chosen if shown is None else chosen & shown
    if sinks is None and not wanted:
        return attention(q, k, v, **options), None
    out, lse = attention(q, k, v, **options, return_lse=True)
    weights = None
    if wanted:
        weights = returned_weights.of_call(q, k, lse, options, width)
    if sinks is None:
        return out, weights
    # A sink adds exp(sink) to a row's sum, which is exp(lse).
    kept = torch.sigmoid(lse.unsqueeze(-1) - sinks.to(lse.dtype))
    if weights is not None:
        weights = weights * kept.to(weights.dtype)
    return out * kept.transpose(1, 2).to(out.dtype), weights


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what may change the output: a keyword that is not known here."""
    for name, x in kwargs.items():
        if x is None or x is False or name in _KNOWN:
            continue
        if name in _PAGED:
            raise UnsupportedError(
                f"{name} is given by continuous batching, which cuflash's "
                "attention function does not support: use model.generate, or "
                "cuflash.torch.forward_kvcache with a page_table"
            )
        raise UnsupportedError(
            f"{type(module).__name__} gives its attention function {name}="
            f"{type(x).__name__}, which cuflash does not know, and which may "
            "change the output: load the model with "
            "attn_implementation='eager', or call it without that keyword"
        )


def _is_additive(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dtype is not torch.bool


def _check_width(mask: Any, k: torch.Tensor) -> None:
    """Refuse a mask of more or fewer keys than there are."""
    width, num_keys = mask.shape[-1], k.shape[1]
    if width != num_keys and (width != 1 or mask.ndim == 2):
        raise ShapeError(
            f"attention_mask has {width} keys, expected {num_keys} as in key "
            f"(attention_mask {tuple(mask.shape)}): give the model a mask of "
            "all keys, cached and added ones too, or load it with "
            "attn_implementation='eager'"
        )


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    is_causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences end to end, told apart by cu_seq_lens_q and cu_seq_lens_k."""
    if isinstance(mask, Mask):
        is_causal, window = mask.causal, mask.window
    else:
        window = _window(sliding_window, is_causal)
    for x in "qk":
        ends = kwargs[f"cu_seq_lens_{x}"]
        options[f"cu_seqlens_{x}"] = ends.to(torch.int32)
        longest = kwargs.get(f"max_length_{x}")
        if isinstance(longest, int):  # a tensor may be on a GPU: not read
            options[f"max_seqlen_{x}"] = longest
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    options |= {"causal": is_causal, "window": window}
    if not kwargs.get("output_attentions"):
        out = attention(*flat, **options)
        return out.view(*q.shape[:2], *out.shape[1:]), None
    if len(q) > 1:
        raise UnsupportedError(
            f"output_attentions=True is given with cu_seq_lens_q and a batch "
            f"of {len(q)}, expected a batch of 1: all tokens end to end"
        )
    out, lse = attention(*flat, **options, return_lse=True)
    of_call = returned_weights.of_call
    weights = of_call(flat[0], flat[1], lse, options, k.shape[1])
    return out[None], weights[None]


def _window(size: int | None, causal: bool) -> Any:
    """A window of so many keys, the query's own among them."""
    if size is None:
        return None
    return (size - 1, None if causal else size - 1)


def _add_mask(
    mask: torch.Tensor,
    q: torch.Tensor,
    is_causal: bool,
    sliding_window: int | None,
    options: dict[str, Any],
) -> None:
    """Add a tensor: what a query sees, numbers to add, or tokens."""
    if mask.ndim == 2:  # (batch, seqlen_k), as flash-attention takes it
        options["causal"] = is_causal
        options["window"] = _window(sliding_window, is_causal)
        tokens = mask.to(torch.int32)
        options["segment_ids_k"] = tokens
        options["segment_ids_q"] = tokens.new_ones(q.shape[:2])
        return
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
