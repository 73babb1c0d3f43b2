"""Whole arrays on every rank."""

from __future__ import annotations

from typing import Any

from .group import Group
from .layouts import unshard
from .machine import machine_of
from .rearrange import contiguous


def gather(
    array: Any,
    *,
    group: Group,
    layout: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: Any = None,
) -> Any:
    """The whole array, on every rank, of the parts of all ranks.

    Parameters
    ----------
    array : NumPy or CuPy array
        This rank's part, as `shard` cuts it; of one shape on all ranks.
    group : Group
    layout, axis, cu_seqlens
        As in `shard`.

    Returns
    -------
    array

    See Also
    --------
    shard
    """
    group.agree(
        f"gather {tuple(array.shape)} {array.dtype.name}, layout {layout!r},"
        f" axis {axis}"
    )
    machine, own = machine_of(array), contiguous(array)
    parts = [
        own if rank == group.rank else machine.empty(own.shape, own.dtype)
        for rank in range(group.size)
    ]
    others = [rank for rank in range(group.size) if rank != group.rank]
    group.exchange(
        [(own, rank) for rank in others],
        [(parts[rank], rank) for rank in others],
    ).wait()
    return unshard(parts, layout=layout, axis=axis, cu_seqlens=cu_seqlens)
