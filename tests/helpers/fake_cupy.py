"""A fake CuPy: arrays without data, and a log of queued operations.

It implements only what `cuflash.backends.cupy` and `validate` use.
"""

import ctypes
import importlib
import sys
import types
from contextlib import contextmanager
from itertools import count
from unittest.mock import Mock

import numpy as np

STREAM = 77
STEP = 1 << 32  # from one allocation to the next


class Memory:
    def __init__(self, ptr, device_id=0):
        self.ptr, self.device_id = ptr, device_id


class ndarray:
    """An array whose `type` is CuPy's class."""

    def __init__(self, shape, dtype, memptr=None, strides=None):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        like = np.broadcast_to(np.zeros((), self.dtype), self.shape)
        self.ndim, self.size = like.ndim, like.size
        steps = np.cumprod([self.dtype.itemsize, *self.shape[:0:-1]])
        self.strides = strides or tuple(map(int, steps[::-1]))
        self.data = memptr or FAKE.alloc(like.nbytes)

    def __getitem__(self, index):
        view = np.broadcast_to(np.zeros((), self.dtype), self.shape)[index]
        return ndarray(view.shape, self.dtype, self.data)

    def __setitem__(self, index, value):
        FAKE.log.append(("copy", self.data.ptr, value.data.ptr))

    def fill(self, value):
        FAKE.log.append(("fill", self.data.ptr, value))


class Event:
    """Done when a test says so."""

    ptr = 6

    def __init__(self, disable_timing=False):
        self.done = False

    def record(self, stream):
        FAKE.log.append(("record", stream.ptr))


class Function:
    kernel = types.SimpleNamespace(ptr=5)


class FakeCupy(types.ModuleType):
    """The module. `log` lists allocations, copies and launches."""

    ndarray = ndarray

    def __init__(self):
        super().__init__("cupy")
        self.log, self.device = [], 0
        self._addresses = count(STEP, STEP)
        properties = {
            "name": b"A fake GPU", "major": 9, "minor": 0,
            "multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 << 10,
            "l2CacheSize": 50 << 20, "memoryClockRate": 2_000_000,
            "memoryBusWidth": 4096,
        }  # fmt: skip
        self.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(
                getDevice=lambda: self.device,
                getDeviceCount=lambda: 0,  # none with streams of its own
                setDevice=self._set_device,
                getDeviceProperties=lambda index: properties,
                driverGetVersion=lambda: 13000,
                memcpyDeviceToHost=2,
                memcpyAsync=self._read_abc,
                memsetAsync=Mock(),
                streamIsCapturing=lambda stream: False,
                streamSynchronize=Mock(),
                streamWaitEvent=self._wait,
            ),
            driver=types.SimpleNamespace(launchKernel=self._launch),
            alloc=self._alloc_for_kernels,
            get_current_stream=lambda: types.SimpleNamespace(ptr=STREAM),
            Device=self._device,
            Stream=types.SimpleNamespace(from_external=self._stream_of),
            Event=Event,
        )

    def from_dlpack(self, foreign):
        return foreign.array

    def asarray(self, foreign):
        return foreign.array

    def alloc(self, nbytes, device=None):
        return Memory(
            next(self._addresses), self.device if device is None else device
        )

    def _alloc_for_kernels(self, nbytes):
        memory = self.alloc(nbytes)
        self.log.append(("alloc", memory.ptr, nbytes))
        return memory

    def _set_device(self, index):
        self.device = index
        self.log.append(("bind", index))

    @contextmanager
    def _device(self, index):
        before, self.device = self.device, index
        yield
        self.device = before

    @contextmanager
    def _stream_of(self, foreign):
        version, stream = foreign.__cuda_stream__()
        assert version == 0
        self.log.append(("stream", self.device, stream))
        yield

    def _read_abc(self, target, source, nbytes, kind, stream):
        assert kind == 2
        ctypes.memmove(target, b"abc"[:nbytes], nbytes)

    def _wait(self, stream, event):
        self.log.append(("wait", stream))

    def _launch(self, function, *sizes):
        *dims, shared, stream, pointers, _ = sizes
        self.log.append(("launch", self.device, stream))

    def launch_as(self, config, function, arguments):
        self.log.append(("overlapping", self.device, int(config.hStream)))

    def logged(self, kind):
        return [x for x in self.log if x[0] == kind]


FAKE = FakeCupy()


def in_place(monkeypatch):
    """Replace CuPy; return the fake and the reloaded backend."""
    import cuflash.backends
    from cuflash.api import arrays as api_arrays
    from cuflash.build import nvrtc

    monkeypatch.setitem(sys.modules, "cupy", FAKE)
    monkeypatch.setitem(sys.modules, "cuflash.backends.cupy", None)
    del sys.modules["cuflash.backends.cupy"]
    monkeypatch.setattr(cuflash.backends, "cupy", None, raising=False)
    backend = importlib.import_module("cuflash.backends.cupy")
    monkeypatch.setattr(nvrtc, "function", lambda kernel, device: Function)
    encoded = staticmethod(lambda address, boxes: bytes(128))
    monkeypatch.setattr(backend.CupyBackend, "tensor_map", encoded)
    monkeypatch.setattr(backend, "_launch_as", FAKE.launch_as)
    monkeypatch.setattr(api_arrays, "on_cuda", lambda: backend)
    FAKE.log.clear()
    return FAKE, backend
