"""Calls with tangents, or inside transforms of torch.func."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.errors import UnsupportedError
from cuflash.request.problem import strip, strip_lse

from .derivatives import Forward, Static
from .request import Request
from .tracing import is_watched


@torch.compiler.disable
def attention(
    request: Request,
    return_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Any:
    """out, and lse if wanted."""
    if is_watched(q, k, v):
        raise UnsupportedError(
            "q, k or v is a fake tensor or of a class of its own, or a "
            "dispatch mode is active, expected neither: forward mode and "
            "torch.func run on plain tensors only"
        )
    tensors, request.tensors = request.tensors, {}
    rank = q.ndim
    given = {"q": q, "k": k, "v": v, **tensors}
    if "cu_seqlens_q" not in tensors:
        given = {name: _full(name, x, rank) for name, x in given.items()}
    else:
        rank = 4
    static = Static(request, tuple(tensors))
    out, lse = Forward.apply(static, *given.values())
    out = strip(out, rank)
    return (out, strip_lse(lse, rank)) if return_lse else out


def _full(name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
    """An argument with the axes that q, of a rank, leaves out."""
    if name in ("q", "k", "v"):
        return {3: x[None], 2: x[None, :, None]}[rank] if rank < 4 else x
    if name in ("bias", "mask"):
        return x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    if name.startswith("segment_ids") and x.ndim == 1:
        return x[None]
    return x
