"""A `Backend` with CuPy's arrays, allocator and current stream.

Calls are queued on that stream; the host reads nothing back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import cupy
import numpy as np

from cuflash.build import nvrtc
from cuflash.errors import UnsupportedError
from cuflash.launch.structs import TensorMap
from cuflash.plans import workspace
from cuflash.plans.plan import (
    OLDEST,
    Device,
    FamilyName,
    Plan,
    wanted_family,
)
from cuflash.request.layouts import Boxes

Array: TypeAlias = cupy.ndarray


def to_cupy(array: Any) -> Array:
    """A CuPy array that shares the memory of any CUDA array."""
    if isinstance(array, cupy.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)
    return cupy.asarray(array)


def on_device(array: np.ndarray, like: Array) -> Array:
    """An array of the host on the device of another array."""
    with cupy.cuda.Device(like.data.device_id):
        return cupy.asarray(array)


def flags_of(indices: Array, length: int) -> Array:
    """Whether each of `length` tokens is among the indices, by batch.

    Negative ones count from the end; one out of range is no token.
    """
    with cupy.cuda.Device(indices.data.device_id):
        x = indices.astype(np.int64)
        x = cupy.where(x < 0, x + length, x)
        x = cupy.where((x >= 0) & (x < length), x, length)
        flags = cupy.zeros((*x.shape[:-1], length + 1), bool)
        batch = (cupy.arange(len(x))[:, None],) if x.ndim == 2 else ()
        flags[(*batch, x)] = True
        return flags[..., :length]


# Arrays of libraries whose streams are not known, with an event after the
# kernels that use them.
_held: deque[tuple[Any, list[Array]]] = deque()
_lock = threading.Lock()  # of `_held`

# Memory of calls in CUDA graphs that nobody else holds: each replay writes to
# it, and CuPy does not say when a graph is gone.
_of_graphs: list[Any] = []


def _is_captured(stream: int) -> bool:
    """Whether a stream's work goes into a CUDA graph."""
    return bool(stream) and cupy.cuda.runtime.streamIsCapturing(stream)


def give_back(lent: Sequence[tuple[Any, Array]]) -> None:
    """Let the owners of arrays go on after what a call has queued.

    An owner knows of the work on its own stream alone: it would give memory
    that the caller deletes to others, or read a result, while kernels on
    CuPy's current stream still run. So the owner's stream waits for them.
    Where it is not known the memory is held until they are done, which a
    later such call finds out.

    Parameters
    ----------
    lent : sequence of (array, Array)
        Another library's array, and the same memory as a CuPy array.
    """
    index = lent[0][1].data.device_id
    cuda = cupy.cuda
    with cuda.Device(index):
        ours = cuda.get_current_stream()
        streams = {_owners_stream(x, index) for x, _ in lent} - {ours.ptr}
        _let_go()
        # What a graph uses has to outlive the graph in any case.
        if not streams or _is_captured(ours.ptr):
            return
        event = cuda.Event(disable_timing=True)
        event.record(ours)
        if None in streams:
            views = [y for x, y in lent if _owners_stream(x, index) is None]
            with _lock:
                _held.append((event, views))
        for stream in streams - {None}:
            cuda.runtime.streamWaitEvent(stream, event.ptr)


def _let_go() -> None:
    """Hold no longer what the kernels are done with."""
    done = []  # freed after the lock: that may run an owner's code
    with _lock:  # else what another thread has looked at would be let go
        while _held and _held[0][0].done:
            done.append(_held.popleft())


def _owners_stream(array: Any, index: int) -> int | None:
    """The stream that an array's owner works on, None if it is not known."""
    torch = sys.modules.get("torch")
    if isinstance(array, getattr(torch, "Tensor", ())):
        assert torch is not None  # it has Tensor
        return int(torch.cuda.current_stream(index).cuda_stream)
    if isinstance(array, cupy.ndarray):  # of a subclass
        return int(cupy.cuda.get_current_stream().ptr)
    try:
        stream = array.__cuda_array_interface__.get("stream")
    except Exception:  # no interface, or none for its dtype
        return None
    # 1 names the null stream.
    return stream if stream is None or stream > 1 else 0


@functools.cache
def device(index: int) -> Device:
    """The properties of the CUDA device `index`."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    capability = 10 * properties["major"] + properties["minor"]
    if capability < OLDEST:
        raise UnsupportedError(
            f"CUDA device {index} has compute capability {capability / 10};"
            f" cuflash needs {OLDEST / 10}"
        )
    return Device(
        arch="sm_90a" if capability == 90 else f"sm_{capability}",
        num_sms=properties["multiProcessorCount"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
        name=properties["name"].decode(),
        bandwidth=_bandwidth(properties),
    )


def _bandwidth(properties: dict[str, Any]) -> int | None:
    """The peak bandwidth of the memory in GB/s, if the driver knows it."""
    # kHz and bits; two transfers per clock.
    rate = 2 * properties["memoryClockRate"] * properties["memoryBusWidth"]
    return round(rate / 8 / 1e6) or None


@functools.cache
def _driver() -> Any:
    """The driver's bindings, imported at the first call on a GPU."""
    from cuda.bindings import driver

    return driver


@functools.lru_cache(maxsize=8192)
def _tensor_map(address: int, boxes: Boxes) -> bytes:
    """A CUtensorMap of (head_dim, token, head, batch), 128-byte swizzled."""
    driver = _driver()
    kind, *sizes = _encodable(boxes)
    error, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        4,
        address,
        *sizes,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error.name} for {boxes}")
    return ctypes.string_at(encoded.getPtr(), TensorMap.itemsize)


@functools.lru_cache(maxsize=4096)
def _encodable(boxes: Boxes) -> tuple[Any, ...]:
    """Data type, sizes, strides, box and element strides for the driver."""
    driver = _driver()
    batch, tokens, heads, columns = boxes.shape
    name = f"CU_TENSOR_MAP_DATA_TYPE_{boxes.dtype.upper()}"
    return (
        getattr(driver.CUtensorMapDataType, name),
        [driver.cuuint64_t(x) for x in (columns, tokens, heads, batch)],
        [driver.cuuint64_t(x) for x in boxes.strides],
        [driver.cuuint32_t(x) for x in (64, boxes.rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
    )


@functools.cache
def _can_overlap(index: int) -> bool:
    """Whether a device and its driver know programmatic dependent launch.

    Before CUDA 12.3 such launches could not be captured in a graph.
    """
    is_known = cupy.cuda.runtime.driverGetVersion() >= 12030
    return is_known and device(index).capability >= 90


@functools.lru_cache(maxsize=4096)
def _overlapping(blocks: int, threads: int, shared: int, stream: int) -> Any:
    """A CUlaunchConfig of a launch that may overlap the one before."""
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    name = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    attribute.id = getattr(driver.CUlaunchAttributeID, name)
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _launch_as(config: Any, function: int, arguments: int) -> None:
    """Launch by a CUlaunchConfig; `arguments` is an array of pointers."""
    driver = _driver()
    (error,) = driver.cuLaunchKernelEx(config, function, arguments, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuLaunchKernelEx: {error.name}")


def bind(index: int) -> None:
    """Make a device's context current in this thread if it has none.

    CUDA's runtime binds a thread at its first call that needs a context; a
    launch by the driver may come before that.
    """
    runtime = cupy.cuda.runtime
    before = runtime.getDevice()
    runtime.setDevice(index)
    runtime.setDevice(before)


_HERE = contextlib.nullcontext()


class CupyBackend:
    """The backend of CUDA device `index`. It is stateless, so also a `Target`.

    A bridge to another library overrides the methods that handle arrays,
    `workspace` and `stream`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.target = self
        self.family: FamilyName | None = wanted_family()

    def device(self) -> Device:
        return device(self.index)

    def load(self, plan: Plan) -> tuple[tuple[Any, ...], ...]:
        """(function, blocks, threads, shared bytes, overlaps) of launches."""
        can = _can_overlap(self.index)
        with self.current():  # a function belongs to the device it loads on
            return tuple(
                (nvrtc.function(x.kernel, self.device()).kernel, x.blocks,
                 x.kernel.threads, x.kernel.shared_bytes, can and x.overlaps)
                for x in plan.launches
            )  # fmt: skip

    def current(self) -> AbstractContextManager[Any]:
        if self.index == cupy.cuda.runtime.getDevice():  # usual case
            return _HERE  # saves 1 us
        return cupy.cuda.Device(self.index)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.ndarray(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = cupy.ndarray(shape, dtype)
        array.fill(0)
        return array

    def rows(
        self, shape: tuple[int, ...], dtype: Any, zero: bool = False
    ) -> Array:
        return self.zeros(shape, dtype) if zero else self.empty(shape, dtype)

    def copy(self, target: Array, source: Array) -> None:
        if _is_captured(self.stream()):
            _of_graphs.append((target, source))
        target[...] = source

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        total, offsets = workspace.side_by_side(nbytes)
        if not total:
            return None, [0] * len(nbytes)
        # A single allocation: creating a CuPy array costs as much as a launch.
        memory = cupy.cuda.alloc(total)
        if _is_captured(self.stream()):
            _of_graphs.append(memory)
        start = memory.ptr
        return memory, [0 if x is None else start + x for x in offsets]

    def address(
        self, arrays: Iterable[Array | None], written: bool = False
    ) -> list[int]:
        return [0 if x is None else x.data.ptr for x in arrays]

    tensor_map = staticmethod(_tensor_map)

    def stream(self) -> int:
        return cupy.cuda.get_current_stream().ptr

    def queue(self) -> int | None:
        stream = self.stream()
        # Each thread has a stream of its own by the handle 2.
        return None if stream == 2 or _is_captured(stream) else stream

    def launch(
        self, loaded: tuple[tuple[Any, ...], ...], arguments: bytes, kind: Any
    ) -> None:
        # Calling cupy's function object takes twice as long, because it
        # inspects each argument. The driver expects an array of pointers to
        # the arguments; there is one argument.
        pointers = ctypes.c_char_p(arguments)
        address = ctypes.addressof(pointers)
        launch = cupy.cuda.driver.launchKernel
        stream = self.stream()
        for function, blocks, threads, shared, overlaps in loaded:
            if overlaps:
                config = _overlapping(blocks, threads, shared, stream)
                _launch_as(config, function.ptr, address)
                continue
            launch(
                function.ptr, blocks, 1, 1, threads, 1, 1, shared, stream,
                address, 0,
            )  # fmt: skip


class Queue(CupyBackend):
    """Launches on a stream of another library, for arrays at addresses.

    The stream's device is current.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def stream(self) -> int:
        return self._stream

    def clear(self, address: int, nbytes: int) -> None:
        """Queue filling memory with 0."""
        cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self._stream)

    def read(self, address: int, nbytes: int) -> bytes:
        """Memory's bytes; waits for the stream."""
        read = ctypes.create_string_buffer(nbytes)
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(
            ctypes.addressof(read), address, nbytes,
            runtime.memcpyDeviceToHost, self._stream,
        )  # fmt: skip
        runtime.streamSynchronize(self._stream)
        return read.raw


_backends: dict[int, CupyBackend] = {}


@functools.cache
def backend(index: int) -> CupyBackend:
    """The only backend of device `index`: it is a key of cached recipes.

    Of threads that make the first, all get one.
    """
    return _backends.setdefault(index, CupyBackend(index))


def forget_backends() -> None:
    """Make them anew when they are needed: they read the environment once."""
    backend.cache_clear()
    _backends.clear()


def backend_of(array: Array) -> CupyBackend:
    """The backend of the device that holds an array."""
    return backend(array.data.device_id)
