"""PyTorch's `flex_attention`: its signature, its layout, its functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from cuflash.errors import ShapeError, ValueRangeError

from . import compiled_functions
from .attention import attend
from .block_mask import mask_of
from .checks import check_tensors
from .tracing import PLAIN

_LAYOUT = "(batch, heads, seqlen, head_dim)"


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention as `torch.nn.attention.flex_attention.flex_attention`.

    It takes that function's place in a program: functions stay as they are,
    and so do block masks. Calls `cuflash.torch.attention`.

    Parameters
    ----------
    query : Tensor, (batch, num_heads_q, seqlen_q, head_dim)
    key, value : Tensor, (batch, num_heads_kv, seqlen_k, head_dim)
        `value` may have another head dimension. A batch of 1 is broadcast.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx)`` returns the score. Tensors
        that it closes over may require grad.
    block_mask : BlockMask, optional
        Of `create_block_mask`, or of torch's function of that name.
    scale : float, optional
        Multiplies the scores; by default head_dim ** -0.5.
    enable_gqa : bool, optional
        Whether num_heads_q may be a multiple of num_heads_kv.
    return_lse : bool, optional
        Whether to return lse too.
    kernel_options : optional
        Ignored: tiles are chosen by tables of this package.
    return_aux : AuxRequest, optional
        Of torch: ``AuxRequest(lse=True, max_scores=True)`` asks for an
        ``AuxOutput`` with lse and the largest scores.

    Returns
    -------
    out : Tensor, (batch, num_heads_q, seqlen_q, head_dim_v)
        With the strides of a transposed (batch, seqlen_q, num_heads_q,
        head_dim_v).
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`; natural logarithms.
    aux : AuxOutput
        Only with `return_aux`: `lse` and `max_scores`, what was not asked for
        None. `max_scores` is the largest visible score of each query, after
        `score_mod`, in the dtype of lse: -inf for a query without keys. No
        gradient reaches it.

    Raises
    ------
    ShapeError
        If shapes do not fit, a block mask has other lengths, or head counts
        differ without `enable_gqa`.
    ExpressionError
        If a function does what cannot be recorded; it names the line.
    ValueRangeError
        If a function reads a tensor on another device.
    UnsupportedError
        For ``AuxRequest(max_scores=True)`` in forward mode or inside a
        transform of torch.func.
    CuflashError
        In the other cases in which `attention` raises.

    See Also
    --------
    attention : the same in the layout of linear layers, with more options.

    Examples
    --------
    >>> import torch
    >>> from cuflash.torch import create_block_mask, flex_attention
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> def decay(score, b, h, q_idx, kv_idx):
    ...     return score - slopes[h] * (q_idx - kv_idx)
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> query, key, value = torch.randn(3, 1, 2, 16, 8)
    >>> mask = create_block_mask(causal, None, None, 16, 16)
    >>> out = flex_attention(query, key, value, decay, block_mask=mask)
    >>> out.sum().backward()
    >>> slopes.grad.shape
    torch.Size([2])
    """
    if not (type(query) in PLAIN and type(key) in PLAIN):
        if not torch.compiler.is_compiling():
            check_tensors({"query": query, "key": key, "value": value})
    shape, shape_kv = query.shape, key.shape
    if not len(shape) == len(shape_kv) == value.ndim == 4:
        raise _wrong_axes(query, key, value)
    if shape[1] != shape_kv[1] and not enable_gqa:
        raise ShapeError(
            f"query has {shape[1]} heads and key {shape_kv[1]}, expected as"
            " many: pass enable_gqa=True where query heads share key heads"
        )
    if shape[0] != shape_kv[0]:
        key, value = _expanded(shape[0], key, value)
    own: Any = None
    program: Any = None
    if not score_mod is block_mask is None:
        sizes = shape[0], shape[1], shape[2], shape_kv[2]
        options = _options(score_mod, block_mask, sizes)
        own, program = compiled_functions.own_or_program(options, {}, query)
    wants_lse, wants_max = return_lse, False
    if return_aux is not None:
        wants_lse, wants_max = _wanted(return_aux, return_lse)
    numbers = scale, False, None, None, None, None
    results = attend(
        query, key, value, wants_lse, numbers, own=own, program=program,
        by_heads=True, return_max_score=wants_max,
    )  # fmt: skip
    if return_aux is None:
        return results
    made = _made_for(return_aux)
    if not wants_max:  # older ones have no such field
        out, lse = results if wants_lse else (results, None)
        return out, made(lse=lse)
    out, *lse, largest = results
    return out, made(lse[0] if lse else None, largest)


def _wrong_axes(*tensors: torch.Tensor) -> ShapeError:
    """The error of tensors that have not four axes each."""
    names = "query", "key", "value"
    wrong = (
        (n, x) for n, x in zip(names, tensors, strict=True) if x.ndim != 4
    )
    name, x = next(wrong)
    return ShapeError(
        f"{name} has shape {tuple(x.shape)}, expected four axes: {_LAYOUT}"
    )


def _expanded(
    batch: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of a batch of 1, for each of query's."""
    if key.shape[0] != 1:
        raise ShapeError(
            f"key has batch {key.shape[0]}, expected {batch} as query or 1"
        )
    sizes = batch, -1, -1, -1
    return key.expand(sizes), value.expand(sizes)


def _options(
    score_mod: Any, block_mask: Any, sizes: tuple[int, int, int, int]
) -> dict[str, Any]:
    """A call's functions, by the names of `attention`."""
    found: dict[str, Any] = {}
    if score_mod is not None:
        found["score_mod"] = score_mod
    if block_mask is not None:
        of_blocks = mask_of(block_mask, sizes)
        if of_blocks is not None:
            found["mask_mod"] = of_blocks
    return found


def _made_for(return_aux: Any) -> Any:
    """The class of what a call returns for such an argument."""
    if torch.compiler.is_compiling():  # which must not go through all modules
        from torch.nn.attention.flex_attention import AuxOutput

        return AuxOutput
    return sys.modules[type(return_aux).__module__].AuxOutput


def _wanted(return_aux: Any, return_lse: bool) -> tuple[bool, bool]:
    """Whether lse and the largest scores are."""
    if return_lse:
        raise ValueRangeError(
            "return_lse and return_aux are both given, expected one of them"
        )
    largest = getattr(return_aux, "max_scores", False)
    return bool(return_aux.lse), bool(largest)
