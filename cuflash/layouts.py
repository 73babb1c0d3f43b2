"""Strides and alignment: what kernels take in place, and what is copied.

Everything here is about a `Layout`, an array without its data, so it is
decided once for all calls that are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.problem import Layout


@dataclass(frozen=True, eq=False)
class Boxes:
    """What a TensorMap says of a 4-D array, but for its address.

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
        """Boxes of an array, or of a `Layout`."""
        # An axis of one element may have any stride, and here gets a legal
        # one.
        batch, token, head, _ = (
            stride if length > 1 else 16
            for stride, length in zip(array.strides, array.shape, strict=True)
        )
        return cls(array.shape, (token, head, batch), array.dtype.name, rows)


# ---- New arrays ----


def new(
    shape: tuple[int, ...], dtype: np.dtype, width: int | None = None
) -> Layout:
    """The layout of a new array with rows of so many elements."""
    dtype = dtype.newbyteorder("=")
    strides = [dtype.itemsize]
    for length in (width or shape[-1], *shape[-2:0:-1]):
        strides.insert(0, strides[0] * length)
    return Layout(shape, tuple(strides), dtype)


def allocated(layout: Layout) -> tuple[int, ...]:
    """The shape to allocate for a layout that `new` made: rows in full."""
    width = layout.strides[-2] // layout.dtype.itemsize
    return (*layout.shape[:-1], width)


def _with_aligned_rows(layout: Layout) -> Layout:
    """A new array like it, with rows at multiples of 16 bytes."""
    step = 16 // layout.dtype.itemsize
    width = -(-layout.shape[-1] // step) * step
    return new(layout.shape, layout.dtype, width)


# ---- What a kernel takes in place ----


def readable(given: Layout, family: str) -> Layout:
    """The layout if kernels can read it, else a copy's, with aligned rows."""
    # All but simt's kernels read rows 16 bytes at a time, and rowsum(dO O)
    # rows of 16-bit elements.
    itemsize = given.dtype.itemsize
    alignment = itemsize if family == "simt" and itemsize > 2 else 16
    if _is_in_place(given, alignment, by_tma=family == "wgmma"):
        return given
    return _with_aligned_rows(given)


def writable(given: Layout, by_tma: bool) -> Layout:
    """The same for what is written, element by element or by TMA."""
    alignment = 16 if by_tma else given.dtype.itemsize
    if _is_in_place(given, alignment, by_tma):
        return given
    return _with_aligned_rows(given)


def contiguous(given: Layout) -> Layout:
    """The layout if it is in C order, else a copy's."""
    copy = new(given.shape, given.dtype)
    in_place = _is_in_place(given, given.dtype.itemsize)
    if in_place and _row_strides(given) == _row_strides(copy):
        return given
    return copy


def by_element(given: Layout) -> Layout:
    """The layout of an option, which kernels read element by element.

    A copy has the axes that the user gave it: 1 where the stride is 0.
    """
    itemsize = given.dtype.itemsize
    in_place = given.dtype.isnative and not any(
        x % itemsize for x in (given.offset, *given.strides)
    )
    if in_place:
        return given
    shape = tuple(
        1 if stride == 0 else size
        for size, stride in zip(given.shape, given.strides, strict=True)
    )
    copy = new((1, *shape), given.dtype)
    kept = zip(copy.strides[1:], given.strides, strict=True)
    strides = tuple(stride if old else 0 for stride, old in kept)
    return Layout(shape, strides, copy.dtype)


def changes(
    given: Mapping[str, Layout], taken: Mapping[str, Layout]
) -> dict[str, Layout]:
    """The layouts of copies: those that are not the given ones."""
    return {name: x for name, x in taken.items() if x is not given[name]}


def _is_in_place(layout: Layout, alignment: int, by_tma: bool = False) -> bool:
    """Whether a kernel can take rows of `alignment` bytes where they are.

    The TMA unit has no strides of 0 or less.
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
    """The strides between rows, of axes that have more than one."""
    sizes = zip(layout.strides[:-1], layout.shape[:-1], strict=True)
    return [stride for stride, length in sizes if length > 1]


# ---- Strides as the argument structs have them ----


def row_strides(layouts: Mapping[str, Layout]) -> dict[str, tuple[int, ...]]:
    """The (batch, token, head) strides of 4-D arrays, in elements.

    0 for an axis of one, whose stride may be anything: kernels form the
    addresses of rows past the end too, which have to be aligned.
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
    """Of sums of a bias's gradient in C order: 0 along axes that it lacks.

    They follow from the shape that the user gave it and not from its strides:
    in a view of `broadcast_to` each element has a gradient of its own.
    """
    strides, step = [], 1
    for size in ((1,) * (4 - len(shape)) + shape)[::-1]:
        strides.append(0 if size == 1 else step)
        step *= size
    return tuple(strides[::-1])
