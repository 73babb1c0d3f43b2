"""A backend that gives each array strides and an offset of its own.

A kernel that reads one array by another's strides is right wherever both are
contiguous and alike. Here no two arrays of a call have a stride in common:
what lies between their elements is NaN, or no index at all, and must stay.
"""

import numpy as np

from .compare import assert_bitwise

# Rows of these begin at multiples of 16 bytes: kernels read them in place.
ROWS = 4  # axes, from which an array's last axis is one of columns
NO_INDEX = 2**31 - 1
MOST = 11  # a prime: the gaps of that many arrays in turn differ


class Apart:
    """Another backend, which places each array apart from the others."""

    def __init__(self, backend):
        self.backend = backend
        self.placed = []  # memory, which elements are the array's, its copy

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def place(self, array):
        """Return a view of memory with gaps; the array's last axis is last.

        Arrays of elements, of fewer axes, have gaps between these, too.
        """
        array = np.asarray(array)
        if array.ndim == 0 or array.size == 0:
            return self.backend.place(array)
        memory, index, view = in_gaps(array, len(self.placed))
        self.placed.append((memory, index, memory.copy()))
        return self.backend.place(view)

    def check_gaps(self):
        """Assert that nothing between the elements was written.

        On a GPU the gaps are a copy's, out of reach here.
        """
        for n, (memory, index, before) in enumerate(self.placed):
            before[index] = memory[index]
            assert_bitwise(memory, before, f"around array {n}")


def in_gaps(array, number):
    """Return memory with gaps, which elements are the array's, their view.

    number : of the array in its call; its strides and offset follow from it.
    """
    order = [*range(array.ndim)]
    if array.ndim >= ROWS and number % 2:  # heads outside of tokens
        order[-3], order[-2] = order[-2], order[-3]
    turned = array.transpose(order)
    memory, index = _around(turned, number)
    memory[index] = turned
    return memory, index, memory[index].transpose(np.argsort(order))


def _around(array, number):
    """Return memory for an array, and the index of its elements.

    Each axis but the first has 1 to `MOST` elements more; of rows, the last
    one as many times 16 bytes.
    """
    shape, index = list(array.shape), []
    for axis, size in enumerate(shape):
        more = ((axis + 1) * number + axis) % MOST + 1 if axis else 0
        first, step = more // 2, 1
        if axis == array.ndim - 1 and array.ndim >= ROWS:
            unit = 16 // array.itemsize
            first, more = unit * (number % 2), -size % unit + unit * more
        elif axis == array.ndim - 1:
            step = 2 + number % MOST
            first, more = 1, (step - 1) * size + 1
        shape[axis] = size + more
        index.append(slice(first, first + step * (size - 1) + 1, step))
    fill = {"i": NO_INDEX, "b": True}.get(array.dtype.kind, np.nan)
    with np.errstate(invalid="ignore"):  # NaN of float8
        return np.full(shape, fill).astype(array.dtype), tuple(index)
