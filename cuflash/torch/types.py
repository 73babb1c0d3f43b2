"""Types for type checkers alone, but `Results`: what overloads return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch

if TYPE_CHECKING:
    from cuflash import distributed
    from cuflash.api.types import Scaled, Window

    class _Shared(TypedDict):
        group: distributed.Group

    class SharedOptions(_Shared, Scaled, total=False):
        """The keywords of `distributed_attention`, but for return_lse."""

        layout: str
        ulysses: int
        window: Window | None
        softcap: float | None
        precision: str | None
        deterministic: bool
        cu_seqlens_q: Any
        cu_seqlens_k: Any


__all__ = ["Results"]

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse
