"""Strides and alignment: which arrays kernels access in place, or by copy.

All functions work on a `Layout`, an array without its data, so their results
are cached for equal calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.request.problem import ALIGNMENT, Layout


@dataclass(frozen=True, eq=False)
class Boxes:
    """The contents of a TensorMap of a 4-D array, without its address.

    Attributes
    ----------
    shape : tuple of int
        (batch, token, head, column).
    strides : tuple of int
        (token, head, batch) in bytes.
    dtype : str
    rows : int
        Tokens of a box, which has 64 columns.
    """

    shape: tuple[int, ...]
    strides: tuple[int, int, int]
    dtype: str
    rows: int

    @classmethod
    def of(cls, array: Any, rows: int) -> Boxes:
        """The boxes of an array or of a `Layout`."""
        # The stride of an axis of length 1 is arbitrary; 16 is a legal one.
        batch, token, head, _ = (
            stride if length > 1 else 16
            for stride, length in zip(array.strides, array.shape, strict=True)
        )
        return cls(array.shape, (token, head, batch), array.dtype.name, rows)


# ---- New arrays ----


def new(
    shape: tuple[int, ...], dtype: np.dtype, width: int | None = None
) -> Layout:
    """The layout of a new array; its rows are `width` elements apart."""
    dtype = dtype.newbyteorder("=")
    strides = [dtype.itemsize]
    for length in (width or shape[-1], *shape[-2:0:-1]):
        strides.insert(0, strides[0] * length)
    return Layout(shape, tuple(strides), dtype)


def allocated(layout: Layout) -> tuple[int, ...]:
    """The shape to allocate for a layout of `new`, with whole rows."""
    width = layout.strides[-2] // layout.dtype.itemsize
    return (*layout.shape[:-1], width)


def converted(layout: Layout, dtype: str) -> Layout:
    """The layout of a copy in another dtype, with rows aligned to 16 bytes."""
    return _with_aligned_rows(replace(layout, dtype=np.dtype(dtype)))


def _with_aligned_rows(layout: Layout) -> Layout:
    """The layout of a new array alike, with rows aligned to 16 bytes."""
    elements = 16 // layout.dtype.itemsize
    width = -(-layout.shape[-1] // elements) * elements
    return new(layout.shape, layout.dtype, width)


# ---- Access in place ----


def readable(given: Layout, alignment: int, by_tma: bool) -> Layout:
    """The layout if kernels can read it, else a copy's, with aligned rows.

    alignment : in bytes, that rows need.
    """
    if _is_in_place(given, alignment, by_tma):
        return given
    return _with_aligned_rows(given)


def foldable(given: Layout) -> Layout:
    """The layout if its first two axes count as one, else a copy's."""
    directions, batch = given.strides[:2]
    one = 1 in given.shape[:2]
    if one or directions == given.shape[1] * batch:
        return given
    return _with_aligned_rows(given)


def folded(given: Layout) -> Layout:
    """A `foldable` layout with its first two axes as one."""
    (count, batch), (first, second) = given.shape[:2], given.strides[:2]
    return Layout(
        (count * batch, *given.shape[2:]),
        (first if batch == 1 else second, *given.strides[2:]),
        given.dtype,
        given.offset,
    )


def row_alignment(given: Layout) -> int:
    """The alignment of all rows in bytes, up to `ALIGNMENT`."""
    return math.gcd(ALIGNMENT, given.offset, *_row_strides(given))


def writable(given: Layout, by_tma: bool = False) -> Layout:
    """The same for a result, written element by element or by TMA."""
    alignment = 16 if by_tma else given.dtype.itemsize
    if _is_in_place(given, alignment, by_tma):
        return given
    return _with_aligned_rows(given)


def contiguous(given: Layout) -> Layout:
    """The layout if it is C-contiguous, else a copy's."""
    copy = new(given.shape, given.dtype)
    in_place = _is_in_place(given, given.dtype.itemsize)
    if in_place and _row_strides(given) == _row_strides(copy):
        return given
    return copy


def by_element(given: Layout, dtype: np.dtype | None = None) -> Layout:
    """The layout of an option array, which kernels read element by element.

    They read it in a dtype, by default its own. A copy keeps broadcast axes:
    it has length 1 where the stride is 0, or 0 as the array has.
    """
    itemsize = given.dtype.itemsize
    if dtype is None:
        dtype = given.dtype
    in_place = dtype == given.dtype and not any(
        x % itemsize for x in (given.offset, *given.strides)
    )
    in_place = in_place and given.dtype.isnative
    if in_place:
        return given
    shape = tuple(
        min(size, 1) if stride == 0 else size
        for size, stride in zip(given.shape, given.strides, strict=True)
    )
    copy = new((1, *shape), dtype)
    kept = zip(copy.strides[1:], given.strides, strict=True)
    strides = tuple(stride if old else 0 for stride, old in kept)
    return Layout(shape, strides, copy.dtype)


def by_any_element(given: Layout) -> Layout:
    """The layout if its elements are aligned, else a copy's, in C order.

    For a kernel that supports any strides.
    """
    copy = new(given.shape, given.dtype)
    return given if by_element(given) is given else copy


def changes(
    given: Mapping[str, Layout], taken: Mapping[str, Layout]
) -> dict[str, Layout]:
    """The layouts of the copies: those that differ from the given ones."""
    return {name: x for name, x in taken.items() if x is not given[name]}


def _is_in_place(layout: Layout, alignment: int, by_tma: bool = False) -> bool:
    """Whether a kernel can access rows, aligned to `alignment`, in place.

    TMA supports positive strides only.
    """
    if 0 in layout.shape:
        return True
    itemsize = layout.dtype.itemsize
    if layout.shape[-1] > 1 and layout.strides[-1] != itemsize:
        return False
    if not layout.dtype.isnative:
        return False
    strides = _row_strides(layout)
    if by_tma and not all(stride > 0 for stride in strides):
        return False
    return not any(x % alignment for x in (layout.offset, *strides))


def _row_strides(layout: Layout) -> list[int]:
    """The strides between rows, of axes longer than 1."""
    sizes = zip(layout.strides[:-1], layout.shape[:-1], strict=True)
    return [stride for stride, length in sizes if length > 1]


# ---- Strides for the argument structs ----


def row_strides(layouts: Mapping[str, Layout]) -> dict[str, tuple[int, ...]]:
    """The (batch, token, head) strides of 4-D arrays, in elements.

    0 for an axis of length 1, whose stride is arbitrary: kernels compute the
    addresses of rows past the end too, and these must be aligned.
    """
    return {
        f"{name}_stride": tuple(
            stride // x.dtype.itemsize if length > 1 else 0
            for stride, length in zip(
                x.strides[:-1], x.shape[:-1], strict=True
            )
        )
        for name, x in layouts.items()
    }


def element_strides(layout: Layout) -> tuple[int, ...]:
    """All strides, in elements."""
    return tuple(x // layout.dtype.itemsize for x in layout.strides)


def sum_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of the sums of dbias, in C order: 0 along broadcast axes.

    They follow from the shape that the user passed, not from its strides:
    each element of a `broadcast_to` view has its own gradient.
    """
    strides, stride = [], 1
    for size in ((1,) * (4 - len(shape)) + shape)[::-1]:
        strides.append(0 if size == 1 else stride)
        stride *= size
    return tuple(strides[::-1])


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of a shape can be broadcast to the full shape."""
    return len(shape) <= len(full) and all(
        got in (1, size)
        for got, size in zip(shape[::-1], full[::-1], strict=False)
    )


def broadcast_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], full: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides for the full shape: 0 along axes of length 1 or left out."""
    missing = len(full) - len(shape)
    kept = (
        0 if size == 1 != wide else stride
        for size, stride, wide in zip(
            shape, strides, full[missing:], strict=True
        )
    )
    return (0,) * missing + tuple(kept)
