"""Workspace of a plan: device memory for intermediate results.

Each workspace pointer of the argument structs (launch/structs.py) has a name
in `NAMES`. A plan lists a `Buffer` for each pointer that its kernels use; the
others are null. One allocation per call holds all buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 256  # bytes, of each buffer in the shared allocation

NAMES = (
    "rotated",
    "sequence_stats",
    "query_tile_ids",
    "key_tile_ids",
    "tile_order",
    "lse_rests",
    "split_out",
    "split_lse",
    "delta",
    "delta_dot",
    "query_rows",
    "dq_sum",
    "tile_counter",
    "previous_tiles",
    "recompute_flags",
    "dq_semaphores",
)


@dataclass(frozen=True)
class Buffer:
    """The array that one workspace pointer points to.

    Attributes
    ----------
    name : str
        The struct's field, one of `NAMES`.
    itemsize : int
        Bytes of an element.
    elements : int
        The number of elements.
    """

    name: str
    itemsize: int
    elements: int

    def __post_init__(self) -> None:
        assert self.name in NAMES, self.name

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.itemsize * self.elements


def delta(rows: int, itemsize: int) -> Buffer:
    """rowsum(dO * O) - dlse of each query (prepare/delta.cu)."""
    return Buffer("delta", itemsize, rows)


def delta_dot(rows: int, itemsize: int) -> Buffer:
    """rowsum(dO * ddO) of each query (prepare/double_delta.cu)."""
    return Buffer("delta_dot", itemsize, rows)


def lse_rests(rows: int, itemsize: int) -> Buffer:
    """What rounding took from the lse of each query (prepare/lse_rests.cu)."""
    return Buffer("lse_rests", itemsize, rows)


def query_rows(nbytes: int) -> Buffer:
    """Row statistics of each query tile for the backward kernels of sm90/.

    prepare/row_stats.cu writes them in place of `delta`. Maxima of each key
    tile may follow them: sm90/integer_dq.cuh.
    """
    return Buffer("delta", 16, nbytes // 16)


def second_query_rows(tiles: int, bytes_of_tile: int) -> Buffer:
    """Row statistics of each query tile for sm90/double_backward.cu."""
    return Buffer("query_rows", bytes_of_tile, tiles)


def dq_sum(elements: int) -> Buffer:
    """float32 or int32 sums of dQ, in the order of common/dq_accum.cuh."""
    return Buffer("dq_sum", 4, elements)


def ints(name: str, elements: int) -> Buffer:
    """int32 counters, flags, semaphores or tile numbers: launch/structs.py."""
    return Buffer(name, 4, elements)


def sequence_stats() -> Buffer:
    """The results of prepare/packed_sequences.cu, a `SequenceStats`."""
    return Buffer("sequence_stats", 12, 1)


def segment_ranges(q_tiles: int, k_tiles: int) -> tuple[Buffer, Buffer]:
    """The results of prepare/segment_ranges.cu; tiles of all batches."""
    return (
        Buffer("query_tile_ids", 8, q_tiles),
        Buffer("key_tile_ids", 8, k_tiles),
    )


def rotated(elements: int, itemsize: int) -> Buffer:
    """Rotated queries (prepare/append_kvcache.cu), in place of arrays.q."""
    return Buffer("rotated", itemsize, elements)


def parts(
    slots: int, rows: int, head_dim_v: int, itemsize: int
) -> tuple[Buffer, Buffer]:
    """O and lse of parts of the keys; a slot holds the rows of one part.

    See decode/parts.cuh.
    """
    return (
        Buffer("split_out", itemsize, slots * rows * head_dim_v),
        Buffer("split_lse", itemsize, slots * rows),
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
