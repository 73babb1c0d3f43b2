"""Gradients of `mod_arrays`, which all ranks have whole: sums over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .group import Group
from .machine import Host
from .rearrange import contiguous


class ArrayGradients:
    """The sums of what a rank's blocks add to the gradients of arrays.

    Parameters
    ----------
    arrays : mapping of str to array
        Those that have gradients; the same on every rank.
    wide : dtype
        Of sums: that of lse.
    machine : Host
    """

    def __init__(
        self, arrays: Mapping[str, Any], wide: Any, machine: Host
    ) -> None:
        self.arrays, self.machine = arrays, machine
        self.totals = {
            name: machine.empty(x.shape, wide) for name, x in arrays.items()
        }
        for total in self.totals.values():
            total.fill(0)

    def add(self, found: Mapping[str, Any]) -> None:
        """Add the gradients of a block."""
        for name, total in self.totals.items():
            total += found[name].astype(total.dtype)

    def summed(self, group: Group) -> dict[str, Any]:
        """The sums over the ranks, in their order: the same bits on each."""
        others = [rank for rank in range(group.size) if rank != group.rank]
        result = {}
        for name, own in self.totals.items():
            parts = [
                contiguous(own) if rank == group.rank
                else self.machine.empty(own.shape, own.dtype)
                for rank in range(group.size)
            ]  # fmt: skip
            group.exchange(
                [(parts[group.rank], rank) for rank in others],
                [(parts[rank], rank) for rank in others],
            ).wait()
            total = sum(parts[1:], start=parts[0])
            result[name] = total.astype(self.arrays[name].dtype)
        return result
