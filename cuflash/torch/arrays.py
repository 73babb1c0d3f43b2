"""What `launch` asks of an array library, for torch tensors.

`backend.TorchBackend` adds a CUDA device to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cuflash.plans import workspace

from .dtypes import TORCH


class TorchArrays:
    """The part of a `backends.base.Backend` that handles tensors."""

    tensor_device: torch.device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return torch.empty(
            shape, dtype=TORCH[dtype], device=self.tensor_device
        )

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return torch.zeros(
            shape, dtype=TORCH[dtype], device=self.tensor_device
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        total, offsets = workspace.side_by_side(nbytes)
        if not total:
            return None, [0] * len(nbytes)
        memory = self.empty((total,), "uint8")
        start = memory.data_ptr()
        return memory, [0 if x is None else start + x for x in offsets]

    def address(
        self, arrays: Iterable[Any], written: bool = False
    ) -> list[int]:
        return [0 if x is None else x.data_ptr() for x in arrays]
