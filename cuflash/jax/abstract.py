"""Arrays of a traced call: only shapes and dtypes are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_ADDRESS_BITS = 44  # of a buffer


@dataclass(frozen=True, eq=False)
class Abstract:
    """An array without data, as `validate` reads arrays.

    C-contiguous, or the first columns of one that is.

    XLA's buffers are aligned and share no memory: addresses are far apart.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    slot : int
        Which of a callback's buffers holds the data.
    width : int or None
        The columns of a row in memory, if they are more than its own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    slot: int = -1
    device_id: int = 0
    width: int | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        held = self.shape
        if self.width is not None:
            held = (*held[:-1], self.width)
        return tuple(
            self.dtype.itemsize * math.prod(held[axis + 1 :])
            for axis in range(len(held))
        )

    def __getitem__(self, index: Any) -> Abstract:
        """The only element along the first axis, or the first columns.

        In the same memory.
        """
        if isinstance(index, tuple):
            *axes, columns = index
            assert axes == [...] and columns.start is None
            shape = (*self.shape[:-1], columns.stop)
            return replace(self, shape=shape, width=self.shape[-1])
        assert index == 0 and self.shape[0] == 1
        return replace(self, shape=self.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def ptr(self) -> int:
        """The address that stands for its buffer's."""
        return (self.slot + 1) << _ADDRESS_BITS

    @property
    def data(self) -> Abstract:
        """The memory, which has the address and the device."""
        return self


def abstract(array: Any, slot: int = -1) -> Abstract:
    """An array, a tracer or an abstract value, without data."""
    return Abstract(tuple(array.shape), np.dtype(array.dtype), slot)


def abstract_all(arrays: Mapping[str, Any]) -> dict[str, Abstract]:
    """The operands of a call, without data, each in a slot of its own."""
    return {x: abstract(y, i) for i, (x, y) in enumerate(arrays.items())}
