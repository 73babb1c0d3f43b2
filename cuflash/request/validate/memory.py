"""Memory that is written: apart from what is read, and from itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.errors import ValueRangeError
from cuflash.request.validate.descriptions import address, remembered


@dataclass(frozen=True, eq=False)
class Memory:
    """Where the arrays of a call lie, from their addresses.

    Attributes
    ----------
    names : tuple of str
    arrays : tuple of (shape, strides, itemsize)
    spans : tuple of (int, int)
        The bytes [low, high) of each array; see `_span`.
    pairs : tuple of (int, int)
        What shares no memory, in the order of checks: first an array that is
        written, then another, or the same, whose elements lie apart.
    """

    names: tuple[str, ...]
    arrays: tuple[tuple, ...]
    spans: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int], ...]


def memory_of(
    seen: tuple[tuple, ...], pairs: Iterable[tuple[int, int]]
) -> Memory:
    """Where arrays lie; each of `seen` begins as those of `describe` do."""
    names = tuple(name for name, *_ in seen)
    arrays = tuple(
        (tuple(shape), tuple(strides), np.dtype(dtype).itemsize)
        for _, shape, strides, dtype, *_ in seen
    )
    spans = tuple(_span(*x) for x in arrays)
    return Memory(names, arrays, spans, tuple(pairs))


def check_apart(written: dict[str, Any], read: dict[str, Any]) -> None:
    """Check that results share no memory with inputs or each other.

    Otherwise kernels would overwrite an input that other rows still read.
    Nor may elements of one result overlap.
    """
    arrays = {**read, **written}
    seen = tuple([
        (name, x.shape, x.strides, x.dtype) for name, x in arrays.items()
    ])  # fmt: skip
    memory = _with_results(seen, len(read))
    check_pairs(memory, tuple(map(address, arrays.values())))


@remembered
def _with_results(seen: tuple[tuple, ...], first: int) -> Memory:
    """The arrays from `first` on are written."""
    results = range(first, len(seen))
    return memory_of(seen, ((i, j) for i in results for j in range(i + 1)))


# Addresses repeat: see `launch`.
@remembered
def check_pairs(memory: Memory, starts: tuple[int, ...]) -> None:
    """Check that pairs of arrays at these addresses share no memory."""
    names, arrays = memory.names, memory.arrays
    ends = [
        (start + low, start + high)
        for start, (low, high) in zip(starts, memory.spans, strict=True)
    ]
    for i, j in memory.pairs:
        if i == j:
            check_elements_apart(names[i], *arrays[i])
        elif ends[i][0] < ends[j][1] and ends[j][0] < ends[i][1]:
            if _overlap(arrays[i], arrays[j], starts[j] - starts[i]):
                both = any(j == k for k, _ in memory.pairs)
                one, other = names[i], names[j]
                why = "both are" if both else f"{other} is read while {one} is"
                raise ValueRangeError(
                    f"{one} shares memory with {other}, expected separate "
                    f"memory: {why} written"
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


def _span(
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


@remembered
def _overlap(memory: tuple, other: tuple, distance: int) -> bool:
    """Whether two arrays, `distance` bytes apart, share an element.

    Cached: the answer takes long for caches that lie between each other, such
    as k and v of one array, and is the same in each call.
    """
    start = 2**62  # no address is negative
    one = np.asarray(_Addresses(start, *memory))
    return np.shares_memory(
        one, np.asarray(_Addresses(start + distance, *other))
    )


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
            "shape": shape,
            "strides": strides,
        }
