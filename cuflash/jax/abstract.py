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
    """A C-contiguous array without data, as `validate` reads arrays.

    XLA's buffers are aligned and share no memory: addresses are far apart.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    slot : int
        Which of a callback's buffers holds the data.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    slot: int = -1
    device_id: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(
            self.dtype.itemsize * math.prod(self.shape[axis + 1 :])
            for axis in range(len(self.shape))
        )

    def __getitem__(self, index: int) -> Abstract:
        """The only element along the first axis, in the same memory."""
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
