"""Autocast: float32 tensors become its dtype, as torch's attention does."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import DTypeError
from cuflash.request.options import DIFFERENTIABLE, is_as_lse


def is_on(q: Any) -> bool:
    """Whether autocast is on for the device of a tensor."""
    # The first is fast, but a compiler does not know it.
    if not torch.compiler.is_compiling():
        if not torch._C._is_any_autocast_enabled():
            return False
    return torch.is_autocast_enabled(q.device.type)


def cast(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: dict[str, Any] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any] | None]:
    """q, k and v in autocast's dtype, and options that fit it.

    A float32 bias is left as it is: it is added to float32 scores.
    """
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (
        _to(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))
    )
    if not given:
        return q, k, v, given
    for name in DIFFERENTIABLE:
        x = given.get(name)
        if x is not None and is_as_lse(name):
            given[name] = _to(name, x, torch.float32)
        elif x is not None and x.dtype is not torch.float32:
            given[name] = _to(name, x, dtype)
    return q, k, v, given


def to_its_dtype(name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor in autocast's dtype."""
    return _to(name, x, torch.get_autocast_dtype(x.device.type))


def check_cache(name: str, x: torch.Tensor) -> None:
    """Refuse a cache that has neither autocast's dtype nor float8."""
    dtype = torch.get_autocast_dtype(x.device.type)
    if x.is_floating_point() and x.dtype not in (dtype, torch.float8_e4m3fn):
        raise DTypeError(
            f"{name} has dtype {_word(x.dtype)} under autocast, expected "
            f"{_word(dtype)}: caches are used in place (make them with "
            f"dtype={dtype}, or leave autocast for this call)"
        )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise DTypeError(
            f"{name} has dtype float64 under autocast, expected float32 or a "
            "16-bit dtype: autocast would drop most of its digits (pass "
            f"{name}.float(), or leave autocast for this call)"
        )
    return x.to(dtype) if x.is_floating_point() else x
