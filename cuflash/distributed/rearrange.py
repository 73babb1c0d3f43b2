"""Arrays of NumPy or CuPy, rearranged along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.api import arrays as api_arrays

# A rearrangement of more slices is by index, which is one kernel on a GPU.
_MOST_SLICES = 32

Source = tuple[int, range]  # which array, and which of its tokens


def library(array: Any) -> Any:
    """The module of an array: NumPy, or CuPy."""
    if isinstance(array, np.ndarray):
        return np
    return api_arrays.on_cuda().cupy


def on_host(array: Any) -> np.ndarray:
    """A NumPy array of a list, or of an array on any device."""
    if isinstance(array, (np.ndarray, list, tuple)):
        return np.asarray(array)
    cupy = api_arrays.on_cuda()
    return cupy.cupy.asnumpy(cupy.to_cupy(array))


def as_bits(array: Any) -> Any:
    """The array as integers of its size: bfloat16 is not of all functions."""
    if array.dtype.itemsize == 2:
        return array.view(np.uint16)
    return array


def contiguous(array: Any) -> Any:
    """The array itself if it is C-contiguous, else a copy."""
    if array.flags.c_contiguous:
        return array
    return library(array).ascontiguousarray(as_bits(array)).view(array.dtype)


def nbytes(array: Any) -> int:
    """The bytes of an array's elements."""
    return math.prod(array.shape) * array.dtype.itemsize


def arrange(arrays: Sequence[Any], sources: list[Source], axis: int) -> Any:
    """A new array of slices of arrays, end to end along an axis."""
    first = arrays[0]
    xp, before = library(first), (slice(None),) * axis
    bits = [as_bits(x) for x in arrays]
    if len(sources) <= _MOST_SLICES:
        slices = [
            bits[i][(*before, slice(x.start, x.stop))] for i, x in sources
        ]
        if not slices:
            slices = [bits[0][(*before, slice(0))]]
        return _concatenated(xp, slices, axis).view(first.dtype)
    starts = np.cumsum([0, *(x.shape[axis] for x in arrays)])
    index = np.concatenate(
        [np.arange(x.start, x.stop) + starts[i] for i, x in sources]
    )
    whole = bits[0] if len(bits) == 1 else xp.concatenate(bits, axis=axis)
    return whole.take(xp.asarray(index), axis=axis).view(first.dtype)


def _concatenated(xp: Any, slices: list[Any], axis: int) -> Any:
    if len(slices) == 1:
        return xp.array(slices[0], order="C")
    return xp.ascontiguousarray(xp.concatenate(slices, axis=axis))
