"""A stand-in for CuPy whose memory is the host's and whose streams are done.

Ranks that are threads share it as processes share devices by CUDA IPC.
"""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np

HANDLE_BYTES = 64


class Array(np.ndarray):
    """An array of the device."""

    data = property(lambda x: SimpleNamespace(ptr=x.ctypes.data, device_id=0))

    def __new__(cls, shape, dtype=float, pointer=None):
        if pointer is None:
            return super().__new__(cls, shape, dtype)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = (ctypes.c_char * size).from_address(pointer.mem.ptr)
        made = super().__new__(cls, shape, dtype, buffer)
        made.memory = pointer.mem  # keeps its owner
        return made


class Memory:
    def __init__(self, size, *_):
        self.size, self.buffer = size, np.zeros(size, np.uint8)
        self.ptr = self.buffer.ctypes.data


class UnownedMemory:
    def __init__(self, ptr, size, owner, device):
        self.ptr, self.size, self.owner = ptr, size, owner


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, non_blocking=True):
        self.ptr = next(_numbers)

    def record(self, event):
        return event

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class Event:
    def __init__(self, disable_timing, interprocess=False):
        self.ptr = next(_numbers)


_numbers = itertools.count(1)


def _handle(address):
    return address.to_bytes(HANDLE_BYTES, "little")


def _address(handle):
    return int.from_bytes(handle, "little")


def _copy(to, source, nbytes, kind, stream):
    ctypes.memmove(to, source, nbytes)


def cupy(**changed):
    """The module; `changed` replaces functions of its runtime."""
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        ipcGetMemHandle=_handle,
        ipcOpenMemHandle=_address,
        ipcCloseMemHandle=lambda address: None,
        ipcGetEventHandle=_handle,
        ipcOpenEventHandle=_address,
        eventDestroy=lambda address: None,
        streamWaitEvent=lambda stream, event: None,
        memcpyAsync=_copy,
        memcpyDefault=4,
        memcpyDeviceToDevice=3,
        CUDARuntimeError=RuntimeError,
    )
    runtime.__dict__.update(changed)
    cuda = SimpleNamespace(
        runtime=runtime,
        Stream=Stream,
        Event=Event,
        Memory=Memory,
        UnownedMemory=UnownedMemory,
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
        get_current_stream=Stream,
    )
    return SimpleNamespace(cuda=cuda, ndarray=Array)
