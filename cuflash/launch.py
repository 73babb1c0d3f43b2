"""Runs calls on CuPy arrays.

Every call is queued on CuPy's current stream and reads nothing back.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import cupy
import numpy as np

from cuflash import calls, compiler
from cuflash.arguments import TensorMap
from cuflash.errors import UnsupportedError
from cuflash.plan import Device, Family, Plan, wanted_family
from cuflash.problem import Call


def to_cupy(array: Any) -> cupy.ndarray:
    """Any array on a CUDA device as CuPy's, sharing its memory."""
    if isinstance(array, cupy.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)
    return cupy.asarray(array)


@functools.cache
def device(index: int) -> Device:
    """The CUDA device `index` as plans see it."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    capability = 10 * properties["major"] + properties["minor"]
    if capability < 75:
        raise UnsupportedError(
            f"CUDA device {index} has compute capability {capability / 10};"
            " cuflash's kernels run from 7.5 (float32, float64) and 8.0"
            " (float16, bfloat16) on"
        )
    return Device(
        arch="sm_90a" if capability == 90 else f"sm_{capability}",
        num_sms=properties["multiProcessorCount"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
    )


@functools.lru_cache(maxsize=4096)
def _loaded(
    decided: Plan, index: int
) -> tuple[tuple[Any, int, int, int], ...]:
    """(function, blocks, threads, shared bytes) of each launch of a plan."""
    return tuple(
        (compiler.function(x.kernel, device(index)), x.blocks,
         x.kernel.threads, x.kernel.shared_bytes)
        for x in decided.launches
    )


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, int, int],
    dtype: str,
    rows: int,
) -> np.ndarray:
    """A CUtensorMap of (head_dim, token, head, batch), 128-byte swizzled."""
    from cuda.bindings import driver

    batch, tokens, heads, columns = shape
    kinds = driver.CUtensorMapDataType
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
        4,
        pointer,
        [driver.cuuint64_t(x) for x in (columns, tokens, heads, batch)],
        [driver.cuuint64_t(x) for x in strides],
        [driver.cuuint32_t(x) for x in (64, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {error.name} for shape {shape}, strides"
            f" {strides}"
        )
    opaque = ctypes.string_at(encoded.getPtr(), TensorMap.itemsize)
    return np.frombuffer(opaque, TensorMap)[0]


class CupyMachine:
    """The CUDA device `index`, which is CuPy's current one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def device(self) -> Device:
        return device(self.index)

    def family(self) -> Family | None:
        return wanted_family()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> cupy.ndarray:
        return cupy.empty(shape, dtype)

    def contiguous(self, array: cupy.ndarray) -> cupy.ndarray:
        return cupy.ascontiguousarray(array)

    def aligned(self, array: cupy.ndarray, alignment: int) -> bool:
        return array.data.ptr % alignment == 0

    def address(self, array: cupy.ndarray, written: bool = False) -> int:
        return array.data.ptr

    def tensor_map(self, array: cupy.ndarray, rows: int) -> np.ndarray:
        return _tensor_map(
            array.data.ptr,
            array.shape,
            calls.tensor_strides(array),
            array.dtype.name,
            rows,
        )

    def launch(self, decided: Plan, arguments: np.ndarray) -> None:
        for function, blocks, threads, shared in _loaded(decided, self.index):
            function((blocks,), (threads,), (arguments,), shared_mem=shared)


def forward(call: Call) -> tuple[cupy.ndarray, cupy.ndarray | None]:
    """Run a forward call: out in full rank and, if wanted, lse."""
    with call.arrays["q"].device as current:
        return calls.forward(call, CupyMachine(current.id))


def backward(call: Call) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
    """Run a backward call: dq, dk, dv in full rank."""
    with call.arrays["q"].device as current:
        return calls.backward(call, CupyMachine(current.id))


def merge_states(call: Call) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Run a merge_states call: out and lse in full rank."""
    with call.arrays["out_a"].device as current:
        return calls.merge_states(call, CupyMachine(current.id))
