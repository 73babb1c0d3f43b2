"""Arrays without their data, by which calls are remembered.

The checks use only ``.shape``, ``.dtype``, ``.strides`` and the address of an
array, so they work for NumPy and CuPy, and CuPy is not imported. Results are
cached by these and the options: validating a repeated call is one look-up.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash.request.layouts import broadcast_strides
from cuflash.request.problem import ALIGNMENT, Layout

# Typed, because 1 == 1.0 == True.
remembered = functools.lru_cache(maxsize=4096, typed=True)


def describe(arrays: dict[str, Any]) -> tuple[tuple, ...]:
    """Describe each array without its data: the cache key of a call.

    A description is (name, shape, strides, dtype, offset, device).
    """
    if isinstance(next(iter(arrays.values()), None), np.ndarray):
        return tuple([
            (name, x.shape, x.strides, x.dtype, address(x) % ALIGNMENT, None)
            for name, x in arrays.items()
        ])  # fmt: skip
    # On CuPy, x.data answers faster than x itself.
    return tuple([
        (name, x.shape, x.strides, x.dtype,
         (memory := x.data).ptr % ALIGNMENT, memory.device_id)
        for name, x in arrays.items()
    ])  # fmt: skip


def layout_of(seen: tuple, full: tuple[int, ...] | None = None) -> Layout:
    """A described array's layout, broadcast to the full shape."""
    _, shape, strides, dtype, offset, _ = seen
    shape, strides = tuple(shape), tuple(strides)
    if full is not None:
        strides = broadcast_strides(shape, strides, full)
    return Layout(shape if full is None else full, strides, dtype, offset)


def address(array: Any) -> int:
    """The address of an array's first element."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr  # CuPy's
