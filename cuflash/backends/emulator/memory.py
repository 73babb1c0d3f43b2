"""The memory of a launch: one file, ``memory.bin``, that the child maps.

Each array is copied to pages of its own, and back if kernels may write to
it. The child maps it at an address that is chosen here: the i-th array lies
in the i-th span of addresses, as far from the start of a page as it does in
this process, so that what is aligned here is aligned there.
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
    """An array in the i-th span of addresses.

    Attributes
    ----------
    address : int
        Of its lowest byte, as the child has it.
    nbytes : int
        From its lowest byte to its highest, gaps between rows included.
    start : int
        The place of its first element in these bytes: not 0 if a stride is
        negative.
    written : bool
        Whether kernels may write to it.
    name : str
        What messages call it.
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
        """Which bytes are the array's and no gap; None if all of them."""
        a = self.array
        if a.flags.forc:
            return None
        mask = np.zeros(self.nbytes, np.uint8)
        shape, strides = (*a.shape, a.itemsize), (*a.strides, 1)
        np.ndarray(shape, np.uint8, mask, self.start, strides)[...] = 1
        return None if mask.all() else mask


class _Layout:
    """Which bytes of the file are taken."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int, skip: int = 0) -> int:
        """The offset of new bytes, which begin `skip` bytes into a page."""
        offset = self.size + skip
        self.size = -(-(offset + nbytes) // PAGE) * PAGE
        return offset


@contextlib.contextmanager
def shared(
    arrays: list[Placed], arguments: np.ndarray
) -> Iterator[tuple[Path, list[str]]]:
    """Put an argument struct and the arrays it points to into a file.

    Without an error, what was written is copied back at the end.

    Yields
    ------
    folder : Path
        Where the file is, for ``launch.txt``.
    lines : list of str
        What that has to say of the file.
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
    """A folder that is no disk's, if the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
