"""Whether a call is traced, so that it has to go by an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cuflash.errors import UnsupportedError

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_traced(q: Any, k: Any, v: Any) -> bool:
    """Whether something other than autograd watches these tensors.

    A compiler, torch.jit.trace, a mode (fake tensors, profilers of operators,
    selective checkpointing), or a class of tensors; or a view
    negates its numbers, which an operator's kernel gets as a copy (the
    imaginary part of a conjugate).
    """
    return torch.compiler.is_compiling() or is_seen(q, k, v)


def is_seen(q: Any, k: Any, v: Any) -> bool:
    """`is_traced`, outside compilers."""
    return is_watched(q, k, v) or q.is_neg() or k.is_neg() or v.is_neg()


def is_watched(q: Any, k: Any, v: Any) -> bool:
    """`is_seen` of tensors that do not negate."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
        or type(q) not in PLAIN
        or type(k) not in PLAIN
        or type(v) not in PLAIN
        or q.is_meta
    )


def refuse_transforms() -> None:
    """Raise inside a transform of torch.func."""
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "attention over caches is called inside a transform of "
            "torch.func, expected a call outside: it has no gradients, and a "
            "batch axis in place of vmap"
        )


def by_operations() -> bool:
    """Whether PyTorch differentiates by its own operations.

    In compiled and traced code, in transforms of torch.func and in forward
    mode: there it takes more than the gradient of an autograd Function.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


TRANSFORMED = (
    "compiled code calls cuflash.torch in forward mode or inside a transform"
    " of torch.func, which its operators do not know: compile the function"
    " that is transformed, or leave out fullgraph"
)


@torch.compiler.assume_constant_result
def is_transformed(mapped: bool) -> bool:
    """Whether code that is traced transforms calls as no operator can.

    Operators have the derivatives of torch.autograd alone.

    Parameters
    ----------
    mapped : bool
        Whether vmap counts.
    """
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack() or ()
    vmap = torch._C._functorch.TransformType.Vmap
    return any(mapped or x.key() != vmap for x in stack)


def refuse_tangents(tensors: Any) -> None:
    """Raise where an operator would lose a tangent.

    Parameters
    ----------
    tensors : iterable of Tensor or None
    """
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                "a tensor has a tangent, expected none: compiled and traced"
                " calls of cuflash.torch have no forward mode; call in eager"
                " mode, on plain tensors"
            )
