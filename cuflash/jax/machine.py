"""CUDA devices as XLA's callbacks see them: buffers and a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from cuflash.api import arrays as api_arrays
from cuflash.backends.base import Backend


class Queue(Protocol):
    """A `Backend`'s launches on one stream, and two copies."""

    def tensor_map(self, address: int, boxes: Any) -> bytes: ...

    def launch(self, loaded: Any, arguments: bytes, kind: Any) -> None: ...

    def clear(self, address: int, nbytes: int) -> None:
        """Queue filling memory with 0."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Memory's bytes; waits for the stream."""


class Machine(Protocol):
    """The devices that calls run on."""

    def first_device(self) -> int:
        """The index of the device for which calls are lowered."""

    def backend(self, index: int) -> Backend:
        """The backend that plans and loads for a device."""

    def open(
        self, context: Any, buffers: Sequence[Any]
    ) -> tuple[int, list[int], Queue]:
        """The device of a callback's buffers, their addresses, its stream."""


class Cuda:
    """The CUDA devices of this process."""

    def first_device(self) -> int:
        return jax.local_devices(backend="cuda")[0].local_hardware_id

    def backend(self, index: int) -> Backend:
        return api_arrays.on_cuda().backend(index)

    def open(
        self, context: Any, buffers: Sequence[Any]
    ) -> tuple[int, list[int], Queue]:
        index, addresses = located(buffers)
        return index, addresses, api_arrays.on_cuda().Queue(context.stream)


# ---- Addresses, from DLPack's capsules ----

# Of a DLTensor (dlpack.h): the address, then the device's type and index, in
# two int32; byte_offset comes after ndim, dtype, shape and strides.
_DEVICE_INDEX, _BYTE_OFFSET = 12, 40

_in_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_in_capsule.restype = ctypes.c_void_p
_in_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]


def located(buffers: Sequence[Any]) -> tuple[int, list[int]]:
    """The index of the device that holds buffers, and their addresses.

    A capsule takes 0.5 us to make and read, an array of CuPy's 20.
    """
    addresses, bits, tensor = [], 0, 0
    for buffer in buffers:
        capsule = buffer.__dlpack__()
        tensor = _in_capsule(capsule, b"dltensor") or 0
        address = ctypes.c_uint64.from_address(tensor).value
        address += ctypes.c_uint64.from_address(tensor + _BYTE_OFFSET).value
        addresses.append(address)
        bits |= address
    index = ctypes.c_int32.from_address(tensor + _DEVICE_INDEX).value
    if bits % 16:
        raise RuntimeError("XLA passed a buffer that is not aligned to 16")
    return index, addresses
