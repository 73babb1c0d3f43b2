"""Slices of block masks: what `mask[b, h, rows]` makes of a mask_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cuflash.errors import DTypeError, ShapeError, ValueRangeError, in_words

from .placed import placeable

_AXES = "batch", "heads", "blocks of queries"


class Chosen(NamedTuple):
    """Which indices of an axis a slice leaves; calls on any device read them.

    Attributes
    ----------
    number : int
    start : Tensor or None
        The first of neighbours, without axes: calls read it when they run, so
        that all slices share a kernel.
    table : Tensor or None
        All of them, if they are no neighbours.
    """

    number: int
    start: torch.Tensor | None
    table: torch.Tensor | None

    def of_head(self, x: Any) -> Any:
        """The index that stands for a batch element or a head.

        The only one stands for all.
        """
        x = x * 0 if self.number == 1 else x
        return x + self.start if self.table is None else self.table[x]

    def of_query(self, x: Any, size: int) -> Any:
        """The query that stands for one, of blocks of so many."""
        if self.table is None:
            return x + self.start
        return self.table[x // size] * size + x % size


def chosen(index: Any, axis: int, size: int, block: int = 1) -> Chosen | None:
    """What an index chooses of an axis; None: all.

    Parameters
    ----------
    index : int, slice or Tensor
    axis : int
    size : int
        The axis' length.
    block : int
        By what `start` is multiplied.

    Raises
    ------
    CuflashError
    """
    if isinstance(index, (int, slice)) and not isinstance(index, bool):
        if isinstance(index, int):
            _check_range(index, index, axis, size)
            index = slice(index % size, index % size + 1)
        taken = range(size)[index]
        if not taken:
            raise ValueRangeError(
                f"a slice of a block mask takes none of {size}"
                f" {_AXES[axis]}, expected one or more"
            )
        if len(taken) == size and taken.step == 1:
            return None
        if taken.step == 1 or len(taken) == 1:
            start = placeable(torch.tensor(taken[0] * block))
            return Chosen(len(taken), start, None)
        return Chosen(len(taken), None, placeable(torch.tensor(taken)))
    table = index if isinstance(index, torch.Tensor) else _as_table(index)
    if table.dtype is torch.bool:
        table = table.nonzero().flatten()
    if table.is_floating_point() or table.is_complex():
        raise DTypeError(
            f"an index of a block mask has dtype {table.dtype}, expected"
            " integers"
        )
    if table.ndim > 1 or not table.numel():
        raise ShapeError(
            f"an index of a block mask has shape {tuple(table.shape)},"
            " expected one axis, of one index or more"
        )
    table = table.reshape(-1).long()
    if not table.is_cuda:
        least, most = int(table.min()), int(table.max())
        _check_range(least, most, axis, size)
    table = torch.where(table < 0, table + size, table)
    return Chosen(len(table), None, placeable(table))


def _as_table(index: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"an index of a block mask is {in_words(index)}, expected an int,"
            " a slice or a tensor of integers"
        ) from None


def _check_range(least: int, most: int, axis: int, size: int) -> None:
    if least < -size or most >= size:
        wrong = least if least < -size else most
        raise ValueRangeError(
            f"an index of a block mask is {wrong}, expected {-size} to"
            f" {size - 1}: it has {size} {_AXES[axis]}"
        )


def queries_of(rows: Chosen, starts: range, seqlen: int) -> int:
    """How many queries are in chosen blocks; `starts`: of all blocks.

    The last of all may have fewer, where it is the last one chosen.
    """
    size = starts.step
    end = starts[-1]
    last = rows.start if rows.table is None else rows.table[-1]
    assert last is not None
    if last.is_cuda:
        return rows.number * size
    if rows.table is None:
        return min(int(last) + rows.number * size, seqlen) - int(last)
    missing = end + size - seqlen if int(last) * size == end else 0
    return rows.number * size - missing


def sliced(
    mask_mod: Callable[..., Any],
    batch: Chosen | None,
    heads: Chosen | None,
    rows: Chosen | None,
    size: int,
) -> Callable[..., Any]:
    """The mask_mod of a slice; `size`: queries of a block."""

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(
            b if batch is None else batch.of_head(b),
            h if heads is None else heads.of_head(h),
            q_idx if rows is None else rows.of_query(q_idx, size),
            kv_idx,
        )

    return visible
