"""Which blocks of queries and keys a rank computes, and what it needs.

In step s of n, rank r computes with the keys of rank r - s, which that rank
sends by itself: the next step's keys travel during this one, and keys that a
rank's queries do not see are not sent. Ranks are counted modulo n.

Within a rank's arrays, tokens have *chunk order*: the first chunk of every
sequence, then the second chunks. For a single sequence it is the order of the
array. A block's queries and keys are then ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from .layouts import Part, chunks_of, num_chunks, parts_of, shifted

Offsets = tuple[int, ...]
Window = tuple[int | None, int | None]


class Hides(Protocol):
    """A mask that may hide whole blocks; hashable."""

    def hides(self, block: Block, mask: Mask) -> bool: ...


@dataclass(frozen=True)
class Mask:
    """The sequences of a call and which pairs are visible.

    Attributes
    ----------
    size : int
        The ranks that share each sequence.
    layout : str
    causal : bool
    window : tuple
        (left, right), each None for no bound.
    offsets_q, offsets_k : tuple of int
        Of the whole sequences; (0, seqlen) without packed sequences.
    packed : bool
    has_functions : bool
        Whether the user's functions need a block's places: see `Block`.
    hidden : Hides or None
        What a mask_mod hides.
    """

    size: int
    layout: str
    causal: bool
    window: Window
    offsets_q: Offsets
    offsets_k: Offsets
    packed: bool
    has_functions: bool = False
    hidden: Hides | None = None

    @property
    def is_aligned(self) -> bool:
        """Whether each pair of chunks is visible, masked, or a diagonal.

        And blocks may join chunks and sequences.
        """
        return (
            self.window == (None, None)
            and not self.has_functions
            and (not self.causal or self.offsets_q == self.offsets_k)
        )

    @property
    def is_rearranged(self) -> bool:
        """Whether chunk order is not the order of the arrays."""
        return self.packed and self.layout == "zigzag"


class Block(NamedTuple):
    """Queries and keys of one call, as ranges in chunk order.

    Attributes
    ----------
    queries, keys : range
    causal : bool
    window : tuple
    cu_seqlens_q, cu_seqlens_k : tuple of int
        Offsets within the block; empty if it is of one sequence.
    sequence : int
    positions : (int, int)
        Of the first query and key in this sequence; only of blocks of one
        chunk each, as those of masks that are not aligned.
    """

    queries: range
    keys: range
    causal: bool = False
    window: Window = (None, None)
    cu_seqlens_q: Offsets = ()
    cu_seqlens_k: Offsets = ()
    sequence: int = 0
    positions: tuple[int, int] = (0, 0)


@functools.lru_cache(maxsize=4096)
def blocks(mask: Mask, rank_q: int, rank_k: int) -> tuple[Block, ...]:
    """The blocks of the queries of one rank and the keys of another."""
    if not mask.is_aligned:
        return tuple(_cut_blocks(mask, rank_q, rank_k))
    if mask.packed:
        found = _packed_blocks(mask, rank_q, rank_k)
    else:
        found = _joined_blocks(mask, rank_q, rank_k)
    return tuple(x for x in found if len(x.queries) and len(x.keys))


@functools.lru_cache(maxsize=4096)
def needed_keys(mask: Mask, rank_q: int, rank_k: int) -> tuple[range, ...]:
    """The keys of a rank that the queries of another see: disjoint ranges."""
    found = sorted((x.keys for x in blocks(mask, rank_q, rank_k)), key=_ends)
    joined: list[range] = []
    for keys in found:
        if joined and keys.start <= joined[-1].stop:
            last = joined.pop()
            keys = range(last.start, max(last.stop, keys.stop))
        joined.append(keys)
    return tuple(joined)


def _ends(tokens: range) -> tuple[int, int]:
    return tokens.start, tokens.stop


def chunk_ranges(mask: Mask, offsets: Offsets) -> tuple[range, ...]:
    """The chunks that a rank holds of all sequences, in chunk order."""
    count = len(chunks_of(0, mask.size, mask.layout))
    length = offsets[-1] // num_chunks(mask.size, mask.layout)
    return tuple(range(i * length, (i + 1) * length) for i in range(count))


def in_chunk_order(mask: Mask, offsets: Offsets, rank: int) -> list[Part]:
    """A rank's parts in chunk order; their tokens are those of its array."""
    parts = parts_of(rank, mask.size, mask.layout, offsets)
    return sorted(parts, key=lambda part: (part.chunk, part.sequence))


# Aligned masks ------------------------------------------------------------


def _joined_blocks(mask: Mask, rank_q: int, rank_k: int) -> Iterator[Block]:
    """The fewest blocks for one sequence."""
    chunks_q = chunk_ranges(mask, mask.offsets_q)
    chunks_k = chunk_ranges(mask, mask.offsets_k)
    whole_q, whole_k = (range(x[-1].stop) for x in (chunks_q, chunks_k))
    if not mask.causal or rank_q == rank_k:
        yield Block(whole_q, whole_k, mask.causal)
        return
    # Chunks of two ranks differ, so each is seen as a whole or not at all:
    # the keys that a chunk of queries sees are the first `count` chunks.
    keys = chunks_of(rank_k, mask.size, mask.layout)
    counts = [
        sum(chunk < own for chunk in keys)
        for own in chunks_of(rank_q, mask.size, mask.layout)
    ]
    for count in sorted({*counts} - {0}):
        rows = [x for x, c in zip(chunks_q, counts, strict=True) if c == count]
        yield Block(
            range(rows[0].start, rows[-1].stop),
            range(chunks_k[count - 1].stop),
        )


def _packed_blocks(mask: Mask, rank_q: int, rank_k: int) -> Iterator[Block]:
    """Of packed sequences: a block for each pair of chunks.

    Keys that belong to a sequence without queries, which only a full mask
    allows, are in no block: nobody needs them.
    """
    count = num_chunks(mask.size, mask.layout)
    cu_q, cu_k = (
        tuple(x // count for x in offsets)
        for offsets in (mask.offsets_q, mask.offsets_k)
    )
    chunks_q = chunks_of(rank_q, mask.size, mask.layout)
    chunks_k = chunks_of(rank_k, mask.size, mask.layout)
    rows = chunk_ranges(mask, mask.offsets_q)
    columns = chunk_ranges(mask, mask.offsets_k)
    for chunk_q, queries in zip(chunks_q, rows, strict=True):
        for chunk_k, keys in zip(chunks_k, columns, strict=True):
            if not mask.causal or chunk_k <= chunk_q:
                diagonal = mask.causal and chunk_k == chunk_q
                for first, end in _runs(cu_q, cu_k):
                    of_q, of_k = cu_q[first : end + 1], cu_k[first : end + 1]
                    yield Block(
                        _between(queries, of_q),
                        _between(keys, of_k),
                        diagonal,
                        (None, None),
                        tuple(x - of_q[0] for x in of_q),
                        tuple(x - of_k[0] for x in of_k),
                    )


def _runs(cu_q: Offsets, cu_k: Offsets) -> Iterator[tuple[int, int]]:
    """Ranges of sequences without those that have keys and no queries."""
    first, count = 0, len(cu_q) - 1
    for i, (of_q, of_k) in enumerate(
        zip(pairwise(cu_q), pairwise(cu_k), strict=True)
    ):
        if of_q[0] == of_q[1] and of_k[0] < of_k[1]:
            if first < i:
                yield first, i
            first = i + 1
    if first < count:
        yield first, count


def _between(tokens: range, offsets: Offsets) -> range:
    """The tokens of a chunk from the first of some offsets to the last."""
    return range(tokens.start + offsets[0], tokens.start + offsets[-1])


# Windows, functions, sequences of unequal lengths --------------------------


def _cut_blocks(mask: Mask, rank_q: int, rank_k: int) -> Iterator[Block]:
    """A block for each pair of chunks of a sequence, cut to what is seen."""
    left, right = mask.window
    if mask.causal:
        right = 0
    parts_q = _placed(mask, mask.offsets_q, rank_q)
    parts_k = _placed(mask, mask.offsets_k, rank_k)
    lengths = [
        [b - a for a, b in pairwise(offsets)]
        for offsets in (mask.offsets_q, mask.offsets_k)
    ]
    for of_queries in parts_q:
        for of_keys in parts_k:
            if of_queries.sequence != of_keys.sequence:
                continue
            at = of_queries.sequence
            shift = lengths[1][at] - lengths[0][at]
            block = cut_block(
                shifted(of_queries.positions, shift),
                of_keys.positions,
                left,
                right,
            )
            if block is None:
                continue
            positions = (
                of_queries.positions.start + block.queries.start,
                of_keys.positions.start + block.keys.start,
            )
            block = block._replace(
                queries=shifted(block.queries, of_queries.tokens.start),
                keys=shifted(block.keys, of_keys.tokens.start),
                sequence=at,
                positions=positions,
            )
            if mask.hidden is None or not mask.hidden.hides(block, mask):
                yield block


def _placed(mask: Mask, offsets: Offsets, rank: int) -> list[Part]:
    """A rank's parts, with tokens in chunk order."""
    placed, token = [], 0
    for part in in_chunk_order(mask, offsets, rank):
        length = len(part.tokens)
        placed.append(part._replace(tokens=range(token, token + length)))
        token += length
    return placed


def cut_block(
    queries: range, keys: range, left: int | None, right: int | None
) -> Block | None:
    """The smallest block with all visible pairs of two ranges of positions.

    Query i sees key j if i - left <= j <= i + right. A call aligns its mask at
    the last query and the last key of the block, so its bounds are shifted:
    in local indices i' and j' of m queries from i_0 and l keys from j_0,

        j' <= i' + (l - m) + right'   with   right' = right + i_0 - j_0 - l + m

    and left' likewise. Both are at least 0, because the last key is seen by a
    query no later than the last one, and the last query sees a key no later
    than the last one.

    Returns
    -------
    Block or None
        Ranges count from the first of each given range; None if no pair is
        visible.
    """
    q0, q1, k0, k1 = queries.start, queries.stop, keys.start, keys.stop
    before = None
    while before != (q0, q1, k0, k1):
        before = q0, q1, k0, k1
        if left is not None:
            k0, q1 = max(k0, q0 - left), min(q1, k1 + left)
        if right is not None:
            k1, q0 = min(k1, q1 + right), max(q0, k0 - right)
        if q0 >= q1 or k0 >= k1:
            return None
    count_q, count_k = q1 - q0, k1 - k0
    shift = q0 - k0 - count_k + count_q
    bounds = [
        None if left is None else left - shift,
        None if right is None else right + shift,
    ]
    if left is not None and left - shift >= count_k - 1:
        bounds[0] = None
    if right is not None and right + shift >= count_q - 1:
        bounds[1] = None
    return Block(
        range(q0 - queries.start, q1 - queries.start),
        range(k0 - keys.start, k1 - keys.start),
        False,
        (bounds[0], bounds[1]),
    )
