"""The memory of a launch: one file, ``memory.bin``, that the child maps.

Each array is copied to its own pages, and back if kernels may write to it.
The child maps it at an address chosen here: array i lies in address span i,
at the same offset within a page as in this process, so its alignment is the
same in both.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.lib.array_utils import byte_bounds

FIRST_ADDRESS, ADDRESS_SPAN = 0x510000000000, 1 << 36
PAGE = 4096


def pointer(array: np.ndarray) -> int:
    """The address of an array's first element in this process."""
    return array.__array_interface__["data"][0]


class Placed:
    """An array in one span of addresses.

    Attributes
    ----------
    address : int
        The address of its lowest byte in the child.
    nbytes : int
        From its lowest byte to its highest, including gaps between rows.
    start : int
        The offset of its first element; not 0 if a stride is negative.
    written : bool
        Whether kernels may write to it.
    name : str
        Its name in messages.
    """

    def __init__(self, array: np.ndarray, span: int) -> None:
        lowest, end = byte_bounds(array)
        self.array = array
        self.address = FIRST_ADDRESS + span * ADDRESS_SPAN + lowest % PAGE
        self.nbytes = end - lowest
        self.start = pointer(array) - lowest
        self.written = False
        self.name = "unnamed"

    def mask(self) -> np.ndarray | None:
        """Which bytes belong to elements; None if there are no gaps."""
        a = self.array
        if a.flags.forc:
            return None
        mask = np.zeros(self.nbytes, np.uint8)
        shape, strides = (*a.shape, a.itemsize), (*a.strides, 1)
        np.ndarray(shape, np.uint8, mask, self.start, strides)[...] = 1
        return None if mask.all() else mask


class _Layout:
    """Allocates ranges of the file."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int, skip: int = 0) -> int:
        """The offset of a new range, which begins `skip` bytes into a page."""
        offset = self.size + skip
        self.size = -(-(offset + nbytes) // PAGE) * PAGE
        return offset


@contextlib.contextmanager
def shared(
    arrays: list[Placed], arguments: np.ndarray
) -> Iterator[tuple[Path, list[str]]]:
    """Write an argument struct and the arrays it points to to a file.

    At the end, unless there was an error, written arrays are copied back.

    Yields
    ------
    folder : Path
        The file's folder, where ``launch.txt`` belongs too.
    lines : list of str
        The lines of ``launch.txt`` that describe the file.
    """
    layout = _Layout()
    nbytes = arguments.nbytes
    at_arguments = layout.take(nbytes)
    lines = [f"arguments {at_arguments} {nbytes}"]
    parts = [(at_arguments, arguments.tobytes())]
    offsets = []
    for x in arrays:
        mask, at_mask = x.mask(), -1
        if mask is not None:
            at_mask = layout.take(mask.size)
            parts.append((at_mask, mask.tobytes()))
        offsets.append(layout.take(x.nbytes, x.address % PAGE))
        lines.append(
            f"array {x.name} {x.address:#x} {x.nbytes} {offsets[-1]}"
            f" {at_mask} {x.written:d}"
        )
    with tempfile.TemporaryDirectory(
        prefix="cuflash_", dir=_held_in_memory()
    ) as folder:
        with open(Path(folder, "memory.bin"), "w+b") as file:
            file.truncate(max(layout.size, PAGE))
            memory = mmap.mmap(file.fileno(), 0)
        for offset, content in parts:
            memory[offset : offset + len(content)] = content
        copies = []
        for x, offset in zip(arrays, offsets, strict=True):
            like, at = x.array, offset + x.start
            copy: np.ndarray = np.ndarray(
                like.shape, like.dtype, memory, at, like.strides
            )
            copy[...] = like
            copies.append(copy)
        yield Path(folder), lines
        for x, copy in zip(arrays, copies, strict=True):
            if x.written:
                x.array[...] = copy


def _held_in_memory() -> str | None:
    """A folder in memory (tmpfs), if the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
