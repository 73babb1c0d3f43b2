"""flash-attn's arguments, in the words of `cuflash.torch`."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
)
from cuflash.request import checks
from cuflash.torch.checks import check_tensors

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Keywords of FlashAttention-3 that change speed alone.
_WITHOUT_EFFECT = {
    "num_splits",
    "pack_gqa",
    "scheduler_metadata",
    "sm_margin",
}

_FLOAT8 = (
    "float8 queries are not supported; cuflash.torch.forward_kvcache "
    "takes float8 caches with k_scale and v_scale"
)

# Other such keywords: their defaults, and why nothing else is offered.
_REFUSED: dict[str, tuple[Any, str]] = {
    "q_descale": (None, _FLOAT8),
    "k_descale": (None, _FLOAT8),
    "v_descale": (None, _FLOAT8),
    "attention_chunk": (
        0,
        "chunked attention is not supported; pass each chunk as a sequence "
        "to flash_attn_varlen_func, or pass segment ids to "
        "cuflash.torch.attention",
    ),
    "rotary_seqlens": (
        None,
        "positions start at cache_seqlens; rotate q and k with "
        "layers.rotary.apply_rotary_emb before the call",
    ),
    "seqused_q": (
        None,
        "all queries are used; leave out the others with cu_seqlens_q",
    ),
}
# Keywords of others, and what to write.
_MASK = "cuflash.torch.attention takes masks and biases, as mask and bias"
_MEANT = {
    "is_causal": "write causal, aligned at the end",
    "scale": "write softmax_scale",
    "sm_scale": "write softmax_scale",
    "dropout": "write dropout_p",
    "window": "write window_size, with -1 for no bound",
    "sliding_window": "write window_size: (n - 1, 0) for n tokens",
    "return_lse": "write return_attn_probs",
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "mask": _MASK,
    "bias": _MASK,
}


def hopper(
    function: str, given: Mapping[str, Any], *taken: str
) -> dict[str, Any]:
    """The keywords of FlashAttention-3 that a function uses.

    Parameters
    ----------
    function : str
        Its name, for messages.
    given : mapping
        The keywords that flash-attn 2's function does not have.
    *taken : str
        Those that the function uses. Others have no effect, or raise an
        UnsupportedError unless they have their default.
    """
    used = {}
    for name, value in given.items():
        if name in taken:
            used[name] = value
        elif name in _REFUSED:
            default, why = _REFUSED[name]
            if value is not default and value != default:
                raise UnsupportedError(
                    f"{name} of {function} is given, expected {default}: {why}"
                )
        elif name not in _WITHOUT_EFFECT:
            cure = _MEANT.get(name, "")
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}"
                f"{': ' * bool(cure)}{cure}"
            )
    return used


def one_of(
    name: str, value: Any, other_name: str, other: Any, default: Any = None
) -> Any:
    """The value of an argument that has two names."""
    if other is default:
        return value
    if value is not default:
        raise ValueRangeError(
            f"{name} and {other_name} are both given, expected one of them: "
            "they are two names of one argument"
        )
    return other


def takes_options_of(
    function: Callable[..., Any],
) -> Callable[[_Function], _Function]:
    """A decorator: ``*options`` and ``**hopper`` are those of a function.

    Its signature shows them in the same order, but for `block_table`.
    """
    options = [
        x
        for x in inspect.signature(function).parameters.values()
        if x.default is not x.empty and x.name != "block_table"
    ]

    def register(stacked: _Function) -> _Function:
        signature = inspect.signature(stacked)
        *own, _options, hopper = signature.parameters.values()
        shown = signature.replace(parameters=[*own, *options, hopper])
        stacked.__signature__ = shown  # type: ignore[attr-defined]
        return stacked

    return register


ROWS = "(batch, seqlen, nheads, headdim)"
PACKED = "(total, nheads, headdim)"
PAGES = "(num_blocks, page_block_size, nheads, headdim)"


def tensor(name: str, given: Any, layout: str) -> Any:
    """Check an argument that is a tensor with the axes of `layout`."""
    if not isinstance(given, torch.Tensor):
        check_tensors({name: given})  # says what makes one
    axes = layout.count(",") + 1
    if given.ndim != axes:
        cure = ""
        if given.ndim == axes - 1 and layout in (ROWS, PACKED):
            cure = (
                f"; pass {name}.unflatten(-1, (nheads, headdim)) if its last "
                "axis holds the heads side by side"
            )
        raise ShapeError(
            f"{name} has shape {tuple(given.shape)}, expected {axes} axes: "
            f"{layout}{cure}"
        )
    return given


def sizes_are_tensors() -> bool:
    """Whether sizes cannot be checked: torch.jit.trace records them."""
    # Compilers do not know the second.
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def one_each(name: str, given: Any, sequences: int) -> Any:
    """Check a tensor that has one number for each sequence."""
    tensor(name, given, "(batch)")
    if not sizes_are_tensors() and given.shape[0] != sequences:
        raise ShapeError(
            f"{name} has shape {tuple(given.shape)}, expected ({sequences},): "
            "one for each sequence"
        )
    return given


def parts(name: str, given: Any, layout: str, number: str) -> Any:
    """The tensors that one tensor holds, stacked along an axis.

    `number` stands for that axis in `layout`.
    """
    tensor(name, given, layout)
    axis = layout.strip("()").split(", ").index(number)
    if not sizes_are_tensors() and given.shape[axis] != int(number):
        raise ShapeError(
            f"{name} has shape {tuple(given.shape)}, expected {number} along "
            f"axis {axis}: {layout}"
        )
    return given.unbind(axis)


def heads(qkv: Any, num_heads_q: int | None) -> Any:
    """q, k and v of a tensor that stacks them, or has `num_heads_q` of q."""
    if num_heads_q is None:
        return parts("qkv", qkv, "(batch, seqlen, 3, nheads, headdim)", "3")
    tensor("qkv", qkv, "(batch, seqlen, nheads + 2 * nheads_k, headdim)")
    others = qkv.shape[2] - num_heads_q
    if not sizes_are_tensors() and (others < 0 or others % 2):
        raise ShapeError(
            f"qkv has {qkv.shape[2]} heads and num_heads_q is {num_heads_q}, "
            "expected num_heads_q + 2 * nheads_k heads "
            f"(qkv {tuple(qkv.shape)})"
        )
    return qkv.split((num_heads_q, others // 2, others // 2), dim=2)


def number(name: str, given: Any) -> Any:
    """A number, or the one that a CPU tensor holds."""
    if not isinstance(given, torch.Tensor):
        return given
    if given.device.type != "cpu":
        raise DTypeError(
            f"{name} is a tensor on {given.device}, expected a number: to "
            "read it, the call would have to wait for the device"
        )
    return given.item()


def window(given: Any) -> tuple[int | None, int | None] | None:
    """flash-attn's window, in which a negative bound is none."""
    if type(given) is tuple and given == (-1, -1):  # the default, fast
        return None
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise DTypeError(
                f"window_size is a tensor on {given.device}, expected two "
                "ints or a CPU tensor: to read it, the call would have to "
                "wait for the device"
            )
        given = given.tolist()
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DTypeError(
            f"window_size is {in_words(given)}, expected (left, right), each "
            "an int, or -1 for no bound"
        )
    left, right = (_bound(x) for x in given)
    return None if left is right is None else (left, right)


def _bound(given: Any) -> Any:
    given = number("window_size", given)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise DTypeError(
            f"window_size has a bound {in_words(given)}, expected an int, or "
            "-1 for no bound"
        )
    bound = int(given)
    return bound if bound >= 0 else None


def _is_off(given: Any) -> bool:
    """Whether a number is the float 0, as by default; checks cost more."""
    return type(given) is float and not given


def masks_and_scores(
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    alibi_slopes: Any,
    **numbers: Any,
) -> dict[str, Any]:
    """The options that all functions have; `numbers` are none up to 0."""
    scale = softmax_scale
    if isinstance(scale, bool):  # causal's place in FlashAttention-3
        raise DTypeError(
            f"softmax_scale is {scale}, expected a number (FlashAttention-3 "
            "has another order of arguments: pass them by name)"
        )
    if scale is not None:
        scale = checks.real("softmax_scale", number("softmax_scale", scale))
    options: dict[str, Any] = {
        "scale": scale,
        "causal": checks.flag("causal", causal),
    }
    bounds = window(window_size)
    if bounds is not None:
        options["window"] = bounds
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    for name, x in numbers.items():
        if x is not None and not _is_off(x):
            x = checks.real(name, number(name, x))
            if x > 0:
                options[name] = x
    return options


def dropout(dropout_p: Any, return_attn_probs: bool) -> dict[str, Any]:
    """The option; `attention` draws a seed for it."""
    if _is_off(dropout_p):
        return {}
    probability = checks.dropout("dropout_p", number("dropout_p", dropout_p))
    if probability and return_attn_probs:
        raise UnsupportedError(
            f"return_attn_probs is given with dropout_p {probability}, "
            "expected dropout_p 0: the pattern of dropout (S_dmask) is not "
            "stored; for out and lse, pass return_softmax_lse=True"
        )
    return {"dropout": probability} if probability else {}


def results(
    out: Any, return_attn_probs: bool, return_softmax_lse: bool
) -> Any:
    """What flash-attn returns: out; out, lse; or out, lse and S_dmask."""
    if return_attn_probs:
        return (*out, None)
    return tuple(out) if return_softmax_lse else out
