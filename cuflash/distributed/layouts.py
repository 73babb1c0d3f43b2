"""Which rank of a group holds which tokens of a sequence.

``"contiguous"``
    Rank r of n holds the r-th of n equal chunks.
``"zigzag"``
    A sequence has 2 n chunks; rank r holds chunks r and 2 n - 1 - r. With a
    causal mask every rank then has the same work.

Packed sequences are cut each on its own, so a rank holds a part of every
sequence, in the sequences' order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cuflash.errors import DTypeError, ShapeError, ValueRangeError, type_name
from cuflash.request import checks

from . import rearrange

LAYOUTS = ("zigzag", "contiguous")


def check_layout(layout: Any) -> str:
    """Return the name of a layout."""
    if layout not in LAYOUTS:
        raise ValueRangeError(
            f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}"
        )
    return layout


def chunks_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """The chunks that a rank holds, in ascending order."""
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def num_chunks(size: int, layout: str) -> int:
    """How many chunks a sequence has; its length must be a multiple."""
    return 2 * size if layout == "zigzag" else size


def check_length(length: int, size: int, layout: str, of: str) -> None:
    """Raise ShapeError if a sequence of that length cannot be cut."""
    count = num_chunks(size, layout)
    if length % count:
        raise ShapeError(
            f"{of} has {length} tokens, expected a multiple of {count}: "
            f"layout {layout!r} cuts a sequence into {count} equal chunks "
            f"for {size} ranks"
        )


def offsets_of(cu_seqlens: Any, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Offsets of packed sequences as a tuple; a device array is read."""
    given = rearrange.on_host(cu_seqlens)
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise ShapeError(
            f"{name} has shape {given.shape} and dtype {given.dtype.name}, "
            "expected offsets (sequences + 1,) of integers"
        )
    offsets = tuple(given.tolist())
    if offsets[0] or any(a > b for a, b in pairwise(offsets)):
        raise ValueRangeError(
            f"{name} is {list(offsets)}, expected offsets that start at 0 "
            "and do not decrease"
        )
    return offsets


class Part(NamedTuple):
    """A chunk of a sequence as one rank holds it.

    Attributes
    ----------
    chunk : int
        Which of the rank's chunks: 0, or 1 for the later one.
    sequence : int
    tokens : range
        Of the rank's array.
    positions : range
        Of the sequence.
    """

    chunk: int
    sequence: int
    tokens: range
    positions: range


def parts_of(
    rank: int, size: int, layout: str, offsets: Sequence[int]
) -> Iterator[Part]:
    """Yield a rank's parts in the order of its array."""
    for sequence, (start, end) in enumerate(pairwise(offsets)):
        length = (end - start) // num_chunks(size, layout)
        token = start // size
        for index, chunk in enumerate(chunks_of(rank, size, layout)):
            positions = range(chunk * length, (chunk + 1) * length)
            yield Part(
                index, sequence, range(token, token + length), positions
            )
            token += length


def positions(
    rank: int,
    size: int,
    seqlen: int | None = None,
    *,
    layout: str = "zigzag",
    cu_seqlens: Any = None,
) -> np.ndarray:
    """The positions in their sequence of the tokens that a rank holds.

    Parameters
    ----------
    rank, size : int
        Of the group.
    seqlen : int, optional
        Tokens of the whole sequence.
    layout : {"zigzag", "contiguous"}, optional
    cu_seqlens : sequence of int, (sequences + 1,), optional
        Offsets of packed sequences, instead of `seqlen`.

    Returns
    -------
    ndarray of int64
        For `cuflash.apply_rotary`, for instance.

    Examples
    --------
    >>> from cuflash.distributed import positions
    >>> [positions(rank, 2, 8).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    offsets = _offsets(rank, size, seqlen, layout, cu_seqlens)
    found = [
        np.arange(x.positions.start, x.positions.stop)
        for x in parts_of(rank, size, layout, offsets)
    ]
    return np.concatenate([np.arange(0), *found])


def _offsets(
    rank: int, size: int, seqlen: int | None, layout: str, cu_seqlens: Any
) -> tuple[int, ...]:
    """Checked offsets of the whole sequences."""
    checks.whole("size", size, 1, 2**31 - 1)
    checks.whole("rank", rank, 0, size - 1)
    check_layout(layout)
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueRangeError("expected either seqlen or cu_seqlens")
    offsets: tuple[int, ...]
    if cu_seqlens is None:
        offsets = 0, checks.length("seqlen", seqlen)
    else:
        offsets = offsets_of(cu_seqlens)
    for number, (start, end) in enumerate(pairwise(offsets)):
        check_length(end - start, size, layout, f"sequence {number}")
    return offsets


def _token_axis(ndim: int, axis: int | None) -> int:
    """Where q, k or v has its tokens, unless `axis` says so."""
    return (1 if ndim == 4 else 0) if axis is None else axis % ndim


def shard(
    array: Any,
    rank: int,
    size: int,
    *,
    layout: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: Any = None,
) -> Any:
    """The part of a whole array that a rank holds.

    Parameters
    ----------
    array : NumPy or CuPy array
        Of whole sequences, such as q, or lse with ``axis=-1``.
    rank, size : int
        Of the group.
    layout : {"zigzag", "contiguous"}, optional
    axis : int, optional
        The axis of tokens; by default 1 in an array with four axes, as q
        has, otherwise 0.
    cu_seqlens : sequence of int, (sequences + 1,), optional
        Offsets of packed sequences.

    Returns
    -------
    array
        A contiguous copy.

    See Also
    --------
    unshard, gather

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.distributed import shard, unshard
    >>> q = np.arange(8).reshape(1, 8, 1, 1)
    >>> parts = [shard(q, rank, 2) for rank in range(2)]
    >>> [part.ravel().tolist() for part in parts]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> bool((unshard(parts) == q).all())
    True
    """
    check_whole_array("array", array, "shard(q, rank, size)")
    axis = _token_axis(array.ndim, axis)
    total = array.shape[axis]
    given = (total, None) if cu_seqlens is None else (None, cu_seqlens)
    offsets = _offsets(rank, size, given[0], layout, given[1])
    if offsets[-1] != total:
        raise ShapeError(
            f"the array has {total} tokens, expected {offsets[-1]}, the last "
            "of cu_seqlens"
        )
    found = [
        (0, shifted(x.positions, offsets[x.sequence]))
        for x in parts_of(rank, size, layout, offsets)
    ]
    return rearrange.arrange([array], found, axis)


def unshard(
    parts: Sequence[Any],
    *,
    layout: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: Any = None,
) -> Any:
    """The whole array of the parts of all ranks: the inverse of `shard`.

    Parameters
    ----------
    parts : sequence of array
        By rank.
    layout, axis, cu_seqlens
        As in `shard`.

    Returns
    -------
    array
    """
    check_parts(parts)
    size = len(parts)
    axis = _token_axis(parts[0].ndim, axis)
    total = sum(x.shape[axis] for x in parts)
    given = (total, None) if cu_seqlens is None else (None, cu_seqlens)
    found = []
    for rank in range(size):
        offsets = _offsets(rank, size, given[0], layout, given[1])
        for x in parts_of(rank, size, layout, offsets):
            start = offsets[x.sequence] + x.positions.start
            found.append((start, (rank, x.tokens)))
    found.sort(key=lambda pair: pair[0])
    return rearrange.arrange(parts, [source for _, source in found], axis)


def check_whole_array(name: str, array: Any, call: str) -> None:
    """Raise DTypeError for a list, or anything else that is no array."""
    if not hasattr(array, "shape"):
        raise DTypeError(
            f"{name} is of type {type_name(array)}, expected an array: call "
            f"{call} for each array"
        )


def check_parts(parts: Any) -> None:
    """Raise unless `parts` are parts of one array: alike but in no axis."""
    if hasattr(parts, "shape") or not isinstance(parts, Sequence):
        raise DTypeError(
            f"parts is of type {type_name(parts)}, expected a list of arrays, "
            "the parts of all ranks: unshard([part_0, part_1])"
        )
    for rank, part in enumerate(parts):
        check_whole_array(f"parts[{rank}]", part, "unshard(parts)")
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise ShapeError(
                f"parts[{rank}] has shape {part.shape} and dtype {part.dtype},"
                f" expected {parts[0].shape} and {parts[0].dtype} as parts[0]:"
                " the parts of one array, from all ranks; call unshard once "
                "for q and once for k"
            )
    if not parts:
        raise ShapeError(
            "parts is empty, expected a list of arrays, the parts of all ranks"
        )


def shifted(tokens: range, by: int) -> range:
    return range(tokens.start + by, tokens.stop + by)
