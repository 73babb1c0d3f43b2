"""Between padded batches and packed sequences: `unpad_input`, `pad_input`."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """The tokens of a padded batch, end to end.

    The lengths decide the shape of the result: the call waits for the device.

    Parameters
    ----------
    hidden_states : Tensor, (batch, seqlen, ...)
    attention_mask : Tensor, (batch, seqlen)
        Nonzero or True for a token, else padding.
    unused_mask : Tensor, (batch, seqlen), optional
        Nonzero for a place that is kept too, but not used.

    Returns
    -------
    hidden_states : Tensor, (total, ...)
        Differentiable.
    indices : Tensor, (total,)
        int64: the place of each token in the flattened batch.
    cu_seqlens : Tensor, (batch + 1,)
        int32: the offset of each sequence.
    max_seqlen : int
    seqused : Tensor, (batch,)
        int32: how many tokens of each sequence are used.

    Examples
    --------
    >>> import torch
    >>> from cuflash.flash_attn.bert_padding import pad_input, unpad_input
    >>> x = torch.arange(6.0).view(2, 3, 1)
    >>> mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    >>> tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
    >>> tokens.flatten(), cu_seqlens, longest
    (tensor([0., 3., 4.]), tensor([0, 1, 3], dtype=torch.int32), 2)
    >>> torch.equal(pad_input(tokens, indices, 2, 3), x * mask[..., None])
    True
    """
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    seqlens = kept.sum(-1, dtype=torch.int32)
    packed = _packed(hidden_states, kept, seqlens)
    return *packed, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Any, attention_mask_in_length: Any
) -> tuple[Any, Any, Any, int]:
    """The tokens of rows that hold several sequences each, end to end.

    Parameters
    ----------
    hidden_states : Tensor, (batch, seqlen, ...)
    attention_mask_in_length : Tensor, (batch, seqlen)
        int: in each row the lengths of its sequences, then 0. A row
        ``[2, 3, 0, 0, 0, 0]`` holds sequences of 2 and of 3 tokens, and one
        place of padding.

    Returns
    -------
    hidden_states : Tensor, (total, ...)
        Differentiable.
    indices : Tensor, (total,)
        int64: the place of each token in the flattened batch.
    cu_seqlens : Tensor, (sequences + 1,)
        int32: the offset of each sequence.
    max_seqlen : int
    """
    lengths = attention_mask_in_length
    place = torch.arange(lengths.shape[-1], device=lengths.device)
    kept = place < lengths.sum(-1, keepdim=True)
    return _packed(hidden_states, kept, lengths[lengths != 0])


def pad_input(
    hidden_states: Any, indices: Any, batch: int, seqlen: int
) -> Any:
    """A padded batch of tokens that are stored end to end.

    Parameters
    ----------
    hidden_states : Tensor, (total, ...)
    indices : Tensor, (total,)
        The place of each token in the flattened batch.
    batch, seqlen : int

    Returns
    -------
    Tensor, (batch, seqlen, ...)
        0 where there is no token. Differentiable.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def index_first_axis(input: Any, indices: Any) -> Any:
    """The rows of `input` at `indices`; differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(
    values: Any, indices: Any, first_axis_dim: int
) -> Any:
    """`first_axis_dim` rows of 0, but for `values` at `indices`."""
    shape = (first_axis_dim, *values.shape[1:])
    return values.new_zeros(shape).index_copy(0, indices, values)


def index_first_axis_residual(input: Any, indices: Any) -> tuple[Any, Any]:
    """`index_first_axis`, and `input` for a residual connection."""
    return index_first_axis(input, indices), input


def _packed(
    hidden_states: Any, kept: Any, seqlens: Any
) -> tuple[Any, Any, Any, int]:
    """The tokens at `kept`, their indices, offsets and the longest length."""
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    ends = torch.cumsum(seqlens, 0, dtype=torch.int32)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    longest = int(seqlens.max()) if len(seqlens) else 0
    return tokens, indices, offsets, longest
