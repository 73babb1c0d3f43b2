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
    # Rotated queries (prepare/append_kvcache.cu), in place of arrays.q.
    "rotated",
    # A `SequenceStats` of prepare/packed_sequences.cu.
    "sequence_stats",
    # Of prepare/segment_ranges.cu and segment_order.cu; tiles of all batches.
    "query_tile_ids",
    "key_tile_ids",
    "tile_order",
    # Visibilities of tiles, and bits of their pairs (prepare/tile_flags.cu).
    "tile_flags",
    "mask_bits",
    # What rounding took from the lse of each query (prepare/lse_rests.cu).
    "lse_rests",
    # O and lse of parts of the keys; a slot holds the rows of one part:
    # decode/parts.cuh.
    "split_out",
    "split_lse",
    # The same of parts of the last query tiles: sm90/forward_key_parts.cuh.
    "key_parts",
    # rowsum(dO * O) - dlse of each query (prepare/delta.cu). For the backward
    # kernels of sm90/, row statistics of each query tile
    # (prepare/row_stats.cu), which maxima of each key tile may follow
    # (sm90/integer_dq.cuh).
    "delta",
    # rowsum(dO * ddO) of each query (prepare/double_delta.cu).
    "delta_dot",
    # Row statistics of each query tile for sm90/double_backward.cu.
    "query_rows",
    # The first query that has each key's largest weight (readouts/).
    "maxima",
    # float32 or int32 sums of dQ, in the order of common/dq_accum.cuh.
    "dq_sum",
    # int32 counters, flags, semaphores or tile numbers: launch/structs.py.
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
