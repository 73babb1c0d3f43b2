"""Scratch memory of a plan: `Buffer`.

A buffer is what one pointer of the argument struct points to. Several things
may share a buffer: its `parts`, in their order. No other place on the host
knows that order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 256  # of each buffer in a common allocation, in bytes


@dataclass(frozen=True)
class Buffer:
    """Elements behind one pointer of the argument struct.

    Attributes
    ----------
    name : str
        The struct's field: ``delta``, ``dq_sum``, ``turns`` or ``found``.
    itemsize : int
        Bytes of an element.
    parts : tuple of (str, int)
        What it holds, and how many elements of each.
    """

    name: str
    itemsize: int
    parts: tuple[tuple[str, int], ...]

    @property
    def elements(self) -> int:
        """Of all parts."""
        return sum(count for _, count in self.parts)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return self.itemsize * self.elements

    def start(self, part: str) -> int:
        """The element at which a part begins."""
        first = 0
        for name, count in self.parts:
            if name == part:
                return first
            first += count
        raise KeyError(part)


def delta(rows: int, itemsize: int) -> Buffer:
    """rowsum(dO * O) of each query (prepare/delta.cu)."""
    return Buffer("delta", itemsize, (("delta", rows),))


def query_rows(tiles: int, bytes_of_tile: int) -> Buffer:
    """All that sm90/'s backward kernels know of each query tile's rows.

    prepare/query_rows.cu writes it in place of `delta`.
    """
    return Buffer("delta", 4, (("query_rows", tiles * bytes_of_tile // 4),))


def dq_sum(elements: int) -> Buffer:
    """Sums of dQ in float32, in the order of common/dq_accum.cuh."""
    return Buffer("dq_sum", 4, (("dq_sum", elements),))


def counters(*, recompute_flags: int = 0, dq_semaphores: int = 0) -> Buffer:
    """Integers by which the blocks of a backward kernel know of one another.

    sm90/counters.cuh has all three parts, common/dq_semaphore.cuh the first
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
    """What prepare/packed_sequences.cu finds: its FoundSequences.

    Behind it blocks with a dynamic scheduler keep which tile they took
    before each.
    """
    return Buffer(
        "found",
        4,
        (("sequences", 4), ("tiles_of_blocks", tiles_of_blocks)),
    )


def segments(
    tiles: int, tiles_of_blocks: int = 0, ordered_tiles: int = 0
) -> Buffer:
    """What prepare/segment_ranges.cu and segment_order.cu find.

    The smallest and the largest id of each tile of queries, then of keys; a
    counter of tiles that were handed out; then as `sequences`; the order in
    which tiles are taken.
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
    """Bytes of the buffers of such names, 0 of those that are not there."""
    found = {buffer.name: buffer.nbytes for buffer in buffers}
    return tuple(found.get(name, 0) for name in names)


@functools.lru_cache(maxsize=4096)
def side_by_side(nbytes: tuple[int, ...]) -> tuple[int, list[int | None]]:
    """Bytes of one allocation for buffers, and where in it each begins.

    None: without a byte.
    """
    total, offsets = 0, []
    for size in nbytes:
        offsets.append(total if size else None)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return total, offsets
