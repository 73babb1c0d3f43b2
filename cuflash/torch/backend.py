"""The `Backend` of torch tensors on a CUDA device.

Tensors and workspaces come from torch's allocator, kernels run on torch's
current stream. CuPy only loads and launches them: nothing is taken from its
memory pool, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from cuflash.backends import cupy as by_cupy

from .arrays import TorchArrays


class _Bound(threading.local):
    """The devices whose context is current in this thread, when chosen."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


class TorchBackend(TorchArrays, by_cupy.CupyBackend):
    """The backend of CUDA device `index`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        # Recipes are shared with calls on CuPy arrays.
        self.target = by_cupy.backend(index)
        self.tensor_device = torch.device("cuda", index)

    def current(self) -> AbstractContextManager[Any]:
        if self.index not in _bound.devices:
            by_cupy.bind(self.index)
            _bound.devices.add(self.index)
        return super().current()

    def stream(self) -> int:
        return _stream(self.index)


def _stream_of(index: int) -> int:
    """The handle of torch's current stream, by its public interface."""
    return torch.cuda.current_stream(index).cuda_stream


# Not public, but ten times as fast, and what torch's own compiler calls.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


@functools.cache
def backend(index: int) -> TorchBackend:
    """The only backend of device `index`."""
    return TorchBackend(index)
