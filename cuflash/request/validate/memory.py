"""Memory that is written: apart from what is read, and from itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.errors import ValueRangeError
from cuflash.request.validate.descriptions import address, remembered


def check_apart(written: dict[str, Any], read: dict[str, Any]) -> None:
    """Check that results share no memory with inputs or each other.

    Otherwise kernels would overwrite an input that other rows still read.
    Nor may elements of one result overlap.
    """
    others = {name: (*_bounds(x), x) for name, x in read.items()}
    for name, out in written.items():
        first, end = _bounds(out)
        for other, (other_first, other_end, x) in others.items():
            if first >= other_end or other_first >= end:
                continue
            if np.shares_memory(_addresses(out), _addresses(x)):
                raise shares_memory(name, other, both=other in written)
        check_elements_apart(name, out.shape, out.strides, out.dtype.itemsize)
        others[name] = first, end, out


def shares_memory(
    written: str, name: str, both: bool = False
) -> ValueRangeError:
    """The error for an array that shares memory with one that is written.

    `both`: the other is written too.
    """
    why = "both are" if both else f"{name} is read while {written} is"
    return ValueRangeError(
        f"{written} shares memory with {name}, expected separate memory: "
        f"{why} written"
    )


def is_same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same elements at the same addresses."""
    return (
        address(a) == address(b)
        and a.strides == b.strides
        and a.shape == b.shape
    )


@remembered
def check_elements_apart(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    """Elements are disjoint if each stride covers the span of smaller ones."""
    span = itemsize
    axes = sorted(
        (abs(stride), size)
        for stride, size in zip(strides, shape, strict=True)
        if size > 1
    )
    for stride, size in axes:
        if stride < span and 0 not in shape:
            raise ValueRangeError(
                f"{name} has elements that share memory with each other "
                f"(shape {shape}, strides {strides} bytes), expected a "
                "separate address for each"
            )
        span += stride * (size - 1)


def _bounds(array: Any) -> tuple[int, int]:
    """The address of an array's lowest byte, and one past its highest."""
    first = address(array)
    low, high = span(array.shape, array.strides, array.dtype.itemsize)
    return first + low, first + high


def span(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """The bytes [low, high) of an array, from its first element's address."""
    low = high = 0
    for stride, size in zip(strides, shape, strict=True):
        if stride < 0:
            low += stride * (size - 1)
        else:
            high += stride * (size - 1)
    return low, high + itemsize


class _Addresses:
    """An array's addresses, for np.shares_memory; the data are not read."""

    def __init__(
        self,
        first: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        itemsize: int,
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (first, True),
            "typestr": f"|V{itemsize}",
            "shape": tuple(shape),
            "strides": tuple(strides),
        }


def _addresses(array: Any) -> np.ndarray:
    return addresses(
        address(array), array.shape, array.strides, array.dtype.itemsize
    )


def addresses(
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
) -> np.ndarray:
    """An array with these addresses, for np.shares_memory alone."""
    return np.asarray(_Addresses(first, shape, strides, itemsize))
