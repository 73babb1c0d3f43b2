"""The `Backend` of torch tensors on a CUDA device.

Tensors and workspaces come from torch's allocator, kernels run on torch's
current stream. CuPy only loads and launches them: nothing is taken from its
memory pool, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from cuflash.backends import cupy as by_cupy
from cuflash.plans import workspace

from .dtypes import TORCH


class _Bound(threading.local):
    """The devices whose context is current in this thread, when chosen."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


class TorchBackend(by_cupy.CupyBackend):
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

    def empty(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        # `launch` calls this where the device is current. Shapes may be
        # those of tensors, torch.Size, which `_new` refuses.
        shape = tuple(shape)
        return _new(shape, _strides(shape), TORCH[dtype])

    @functools.cached_property
    def by_heads(self) -> _ByHeads:
        """The same for tensors whose heads stand before their tokens."""
        return _ByHeads(self)

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

    def stream(self) -> int:
        return _stream(self.index)


class _ByHeads(TorchBackend):
    """A backend's device for (batch, heads, seqlen, head_dim) tensors."""

    def __init__(self, base: TorchBackend) -> None:
        vars(self).update(vars(base))

    def rows(
        self, shape: tuple[int, ...], dtype: Any, zero: bool = False
    ) -> torch.Tensor:
        if len(shape) != 4:
            return super().rows(shape, dtype, zero)
        new = _new(*_exchanged(*shape), TORCH[dtype])
        return new.zero_() if zero else new


@functools.lru_cache(maxsize=4096)
def _exchanged(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of an array whose middle axes are exchanged."""
    (a, b, c, d), strides = shape, _strides(shape)
    return (a, c, b, d), (strides[0], strides[2], strides[1], strides[3])


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a C-contiguous array, in elements."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _new_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Not public, but several times as fast: code that torch compiles calls these.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
_new = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _new_tensor)


_backends: dict[int, TorchBackend] = {}


@functools.cache
def backend(index: int) -> TorchBackend:
    """The only backend of device `index`, also if threads make the first."""
    return _backends.setdefault(index, TorchBackend(index))
