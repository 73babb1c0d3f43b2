"""Checks of arguments that the rest of cuflash does not make."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from cuflash.errors import DTypeError, UnsupportedError, type_name


def check_tensors(given: dict[str, Any]) -> None:
    """Check that arguments are plain tensors.

    Raises
    ------
    DTypeError
        If one is no tensor.
    UnsupportedError
        If one is sparse or nested.
    """
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise DTypeError(
                f"{name} is of type {type_name(x)}, expected a "
                f"torch.Tensor{_advice(name, x)}"
            )
        if x.layout is not torch.strided:
            _refuse_layout(name, x)


def _advice(name: str, x: Any) -> str:
    if hasattr(type(x), "__dlpack__"):
        return f" (pass torch.from_dlpack({name}))"
    if isinstance(x, (list, tuple, int, float)):
        return f" (pass torch.tensor({name}))"
    return ""


def _refuse_layout(name: str, x: torch.Tensor) -> None:
    advice = f"pass {name}.to_dense()"
    if x.is_nested:
        advice = (
            "its values() and offsets() are packed sequences: pass them "
            "with cu_seqlens_q and cu_seqlens_k"
        )
    raise UnsupportedError(
        f"{name} has layout {x.layout}, expected torch.strided ({advice})"
    )


def have_tangents(given: dict[str, torch.Tensor]) -> bool:
    """Whether one has a tangent; only inside a level of forward mode."""
    return any(
        forward_ad.unpack_dual(x).tangent is not None for x in given.values()
    )


def check_no_tangents(given: dict[str, torch.Tensor], why: str) -> None:
    """Refuse tensors whose tangents nobody would compute with."""
    if forward_ad._current_level < 0:
        return
    for name, x in given.items():
        if have_tangents({name: x}):
            raise UnsupportedError(
                f"{name} has a tangent, expected none: {why}"
            )
