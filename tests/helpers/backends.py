"""The arrays that tests call cuflash with: NumPy's, and CuPy's on a GPU.

A test is written on NumPy arrays. `place` puts one on the device with the
very strides and alignment it has on the host, `fetch` brings a result back.
"""

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds


class NumpyBackend:
    """The CPU path: arrays stay where they are."""

    name = "numpy"
    array_type = np.ndarray

    def place(self, array):
        return array

    def fetch(self, array):
        return array

    def poison(self):
        """Nothing to do: NumPy memory is not pooled."""


class CupyBackend:
    """The GPU path."""

    name = "cupy"

    @property
    def array_type(self):
        import cupy

        return cupy.ndarray

    def place(self, array):
        """Copy a NumPy view's memory to the device and view it alike."""
        import cupy

        if array.size == 0:
            return cupy.empty(array.shape, array.dtype)
        first, end = byte_bounds(array)
        start = array.__array_interface__["data"][0]
        # Device memory is 256-byte aligned; keep the host's alignment, so
        # that a misaligned view is misaligned there too.
        lead = first % 256
        host = np.full(lead + end - first, 0xFF, np.uint8)
        host[lead:] = _bytes_at(first, end, array)
        memory = cupy.asarray(host)
        return cupy.ndarray(
            array.shape,
            array.dtype,
            memptr=memory.data + (lead + start - first),
            strides=array.strides,
        )

    def fetch(self, array):
        import cupy

        return cupy.asnumpy(array)

    def poison(self, nbytes=1 << 22):
        """Fill the free block of CuPy's pool that the next calls get.

        All ones are NaN in every dtype: an element that no kernel writes
        then shows.
        """
        import cupy

        blocks = [
            cupy.full(size, 0xFF, np.uint8)
            for size in (1 << 10, 1 << 14, 1 << 18, nbytes)
        ]
        del blocks


def _bytes_at(first, end, owner):
    """View host memory [first, end), which `owner` keeps alive."""
    holder = _Memory(first, end - first, owner)
    return np.asarray(holder)


class _Memory:
    def __init__(self, address, nbytes, owner):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, True),
        }


BACKENDS = [
    pytest.param(NumpyBackend(), id="numpy"),
    pytest.param(CupyBackend(), id="cupy", marks=pytest.mark.gpu),
]

on_backends = pytest.mark.parametrize("backend", BACKENDS)
