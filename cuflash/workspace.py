"""Workspace of a plan: `Buffer`.

A buffer is the memory behind one pointer of the argument struct. It consists
of one or more `parts`, in a fixed order that only this module knows on the
host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 256  # bytes, of each buffer in the shared allocation


@dataclass(frozen=True)
class Buffer:
    """The elements behind one pointer of the argument struct.

    Attributes
    ----------
    name : str
        The struct's field: ``delta``, ``dq_sum``, ``turns`` or ``found``.
    itemsize : int
        Bytes of an element.
    parts : tuple of (str, int)
        The name and the number of elements of each part.
    """

    name: str
    itemsize: int
    parts: tuple[tuple[str, int], ...]

    @property
    def elements(self) -> int:
        """The number of elements of all parts."""
        return sum(count for _, count in self.parts)

    @property
    def nbytes(self) -> int:
        """The size of all parts in bytes."""
        return self.itemsize * self.elements

    def start(self, part: str) -> int:
        """The index of a part's first element."""
        first = 0
        for name, count in self.parts:
            if name == part:
                return first
            first += count
        raise KeyError(part)


def delta(rows: int, itemsize: int) -> Buffer:
    """rowsum(dO * O) for each query (prepare/delta.cu)."""
    return Buffer("delta", itemsize, (("delta", rows),))


def query_rows(tiles: int, bytes_of_tile: int) -> Buffer:
    """Row statistics of each query tile for the backward kernels of sm90/.

    prepare/query_rows.cu writes them in place of `delta`.
    """
    return Buffer("delta", 4, (("query_rows", tiles * bytes_of_tile // 4),))


def dq_sum(elements: int) -> Buffer:
    """float32 sums of dQ, in the element order of common/dq_accum.cuh."""
    return Buffer("dq_sum", 4, (("dq_sum", elements),))


def counters(*, recompute_flags: int = 0, dq_semaphores: int = 0) -> Buffer:
    """Counters, flags and semaphores through which backward blocks interact.

    sm90/counters.cuh uses all three parts, common/dq_semaphore.cuh the first
    and the last.
    """
    return Buffer(
        "turns",
        4,
        (
            ("tiles_handed_out", 1),
            ("recompute_flags", recompute_flags),
            ("dq_semaphores", dq_semaphores),
        ),
    )


def sequences(tiles_of_blocks: int = 0) -> Buffer:
    """The results of prepare/packed_sequences.cu (FoundSequences).

    After them, blocks with a dynamic scheduler record, for each tile, which
    tile they took before it.
    """
    return Buffer(
        "found",
        4,
        (("sequences", 4), ("tiles_of_blocks", tiles_of_blocks)),
    )


def segments(
    tiles: int, tiles_of_blocks: int = 0, ordered_tiles: int = 0
) -> Buffer:
    """The results of prepare/segment_ranges.cu and segment_order.cu.

    The smallest and the largest id of each query tile, then of each key tile;
    a counter of tiles handed out; the tile that a block took before each
    tile, as in `sequences`; the order in which tiles are handed out.
    """
    return Buffer(
        "found",
        4,
        (
            ("segment_ranges", 2 * tiles),
            ("tiles_handed_out", 1),
            ("tiles_of_blocks", tiles_of_blocks),
            ("tile_order", ordered_tiles),
        ),
    )


def sizes(buffers: Iterable[Buffer], names: Iterable[str]) -> tuple[int, ...]:
    """Bytes of the named buffers, 0 for a buffer that does not exist."""
    nbytes = {buffer.name: buffer.nbytes for buffer in buffers}
    return tuple(nbytes.get(name, 0) for name in names)


@functools.lru_cache(maxsize=4096)
def side_by_side(nbytes: tuple[int, ...]) -> tuple[int, list[int | None]]:
    """The size of one allocation for all buffers, and each buffer's offset.

    In bytes; the offset of an empty buffer is None.
    """
    total, offsets = 0, []
    for size in nbytes:
        offsets.append(total if size else None)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return total, offsets
