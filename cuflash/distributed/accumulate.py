"""Sums of what blocks contribute, in float32 (float64 for float64 arrays).

`Sums` adds gradients; `Merged` merges outputs by their lse. Contributions to
a range of rows are held, in their own dtype, until `MOST_HELD` can be combined
in one pass over memory; the last pass rounds to the result's dtype. The first
contribution, if it is to all rows, becomes the result's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .machine import Host

# Arrays that one pass combines: launch.partial.MOST_OTHERS and another.
MOST_HELD = 4


class Sums:
    """The sum of contributions to ranges of rows.

    Parameters
    ----------
    machine : Host
    shape : tuple of int
        (batch, rows, heads, head_dim) of the result.
    dtype
        Of the result and of the contributions.
    ranges : sequence of range
        Cover all rows.
    expected : iterable of range
        The rows of each contribution to come, in any order.
    """

    def __init__(
        self,
        machine: Host,
        shape: tuple[int, ...],
        dtype: Any,
        ranges: Sequence[range],
        expected: Iterable[range],
    ) -> None:
        self.machine, self.shape, self.dtype = machine, shape, dtype
        self.ranges = [x for x in ranges if len(x)]
        self.wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        self.left = [0] * len(self.ranges)
        # Of each range: a sum in the wide dtype or one contribution, and
        # further contributions.
        self.held: list[list[Any]] = [[] for _ in self.ranges]
        for rows in expected:
            for i, own in enumerate(self.ranges):
                self.left[i] += _overlap(own, rows) is not None
        self._result: Any = None
        self._targets: dict[int, Any] = {}

    def add(self, rows: range, array: Any) -> None:
        """Add a contribution, (batch, len(rows), heads, head_dim).

        It belongs to the sum from now on.
        """
        is_first = self._result is None and not any(self.held)
        if is_first and len(rows) == self.shape[1]:
            self._result = array
        for i, own in enumerate(self.ranges):
            part = _overlap(own, rows)
            if part is not None:
                self.left[i] -= 1
                in_place = self._result is array
                cut = self._target(i) if in_place else _cut(array, rows, part)
                self._add(i, part, cut)

    def _add(self, i: int, part: range, array: Any) -> None:
        own, held = self.ranges[i], self.held[i]
        is_last = not self.left[i]
        if part == own:
            held.append(array)
            if is_last:
                self._combine_held(i, self._target(i))
            elif len(held) == MOST_HELD:
                self._combine_held(i, self._widest(i))
            return
        self._combine_held(i, self._widest(i))
        view = held[0][:, part.start - own.start : part.stop - own.start]
        self._combine(i, part, view, [array], view)
        if is_last:
            self._combine_held(i, self._target(i))

    def _combine_held(self, i: int, target: Any) -> None:
        """Make what is held of a range one array, `target`."""
        if not self.held[i]:
            target[...] = 0
        else:
            first, *others = self.held[i]
            if others:
                self._combine(i, self.ranges[i], first, others, target)
            elif first is not target:
                self.machine.copy(target, first)
        self.held[i][:] = [target]

    def _combine(
        self, i: int, part: range, a: Any, others: list[Any], to: Any
    ) -> None:
        self.machine.add(a, others, to)

    def _widest(self, i: int) -> Any:
        """The wide array that is held of a range, or a new one."""
        held, rows = self.held[i], self.ranges[i]
        if held and held[0].dtype == self.wide:
            return held[0]
        batch, _, *rest = self.shape
        return self.machine.empty((batch, len(rows), *rest), self.wide)

    def _target(self, i: int) -> Any:
        """The result's rows of a range."""
        if i not in self._targets:
            if self._result is None:
                self._result = self.machine.empty(self.shape, self.dtype)
            rows = self.ranges[i]
            self._targets[i] = self._result[:, rows.start : rows.stop]
        return self._targets[i]

    def result(self) -> Any:
        """The result, after the last contribution."""
        for i, held in enumerate(self.held):
            if not held:  # rows without a contribution
                self._target(i).fill(0)
        if self._result is None:  # no rows
            self._result = self.machine.empty(self.shape, self.dtype)
        return self._result


class Merged(Sums):
    """Outputs merged by their lse; `lse` is (batch, heads, rows)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lse: Any = None
        # Of each range: lse of what is held, but for the first.
        self._held_lse: list[list[Any]] = [[] for _ in self.ranges]
        self._given: Any = None

    @property
    def lse(self) -> Any:
        """The merged lse, after the last contribution."""
        if self._lse is None:
            batch, rows, heads, _ = self.shape
            self._lse = self.machine.empty((batch, heads, rows), self.wide)
            self._lse.fill(-np.inf)
        return self._lse

    def merge(self, rows: range, out: Any, lse: Any) -> None:
        """Merge a contribution, and its lse (batch, heads, len(rows)).

        Both belong to the result from now on.
        """
        if self._lse is None and len(rows) == self.shape[1]:
            self._lse = lse
        self._given = rows, lse
        self.add(rows, out)

    def _add(self, i: int, part: range, array: Any) -> None:
        rows, lse = self._given
        of_part = lse[..., part.start - rows.start : part.stop - rows.start]
        if self.held[i] or part != self.ranges[i]:
            self._held_lse[i].append(of_part)
        elif lse is not self._lse:
            self.lse[..., part.start : part.stop] = of_part
        super()._add(i, part, array)

    def _combine(
        self, i: int, part: range, a: Any, others: list[Any], to: Any
    ) -> None:
        own = self.lse[..., part.start : part.stop]
        lses = self._held_lse[i][: len(others)]
        del self._held_lse[i][: len(others)]
        pairs = list(zip(others, lses, strict=True))
        self.machine.merge(a, own, pairs, to)


def _overlap(a: range, b: range) -> range | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, stop) if start < stop else None


def _cut(array: Any, rows: range, part: range) -> Any:
    return array[:, part.start - rows.start : part.stop - rows.start]
