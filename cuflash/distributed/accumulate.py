"""Sums of what blocks contribute, in float32 (float64 for float64 arrays).

`Sums` adds gradients; `Merged` merges outputs by their lse. A range of rows
that one block contributes to as a whole keeps that block's array until the
second contribution, and the last one is rounded to the result's dtype in the
same pass, so that no pass over the rows only converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .machine import Host


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
        self.held: list[Any] = [None] * len(self.ranges)
        self.total = 0
        for rows in expected:
            self.total += len(rows) > 0
            for i, own in enumerate(self.ranges):
                self.left[i] += _overlap(own, rows) is not None
        self._whole: Any = None
        self._result: Any = None

    def add(self, rows: range, array: Any) -> None:
        """Add a contribution, (batch, len(rows), heads, head_dim)."""
        if self.total == 1 and len(rows) == self.shape[1]:
            self._whole = array
            return
        for i, own in enumerate(self.ranges):
            part = _overlap(own, rows)
            if part is not None:
                self._add(i, part, _cut(array, rows, part))

    def _add(self, i: int, part: range, array: Any) -> None:
        own, held = self.ranges[i], self.held[i]
        self.left[i] -= 1
        target = _rows(self.result(), own) if not self.left[i] else None
        if part == own and held is None:
            if target is not None:
                self.machine.copy(target, array)
            self.held[i] = array if target is None else target
        elif part == own:
            if target is None:
                target = held if held.dtype == self.wide else self._new(own)
            self._combine(i, own, held, array, target)
            self.held[i] = target
        else:
            held = self._widened(i)
            view = held[:, part.start - own.start : part.stop - own.start]
            self._combine(i, part, view, array, view)
            self.held[i] = held
            if target is not None:
                self.machine.copy(target, held)

    def _combine(self, i: int, part: range, a: Any, b: Any, to: Any) -> None:
        self.machine.add(a, b, to)

    def _new(self, rows: range) -> Any:
        batch, _, *rest = self.shape
        return self.machine.empty((batch, len(rows), *rest), self.wide)

    def _widened(self, i: int) -> Any:
        """What is held of a range, in the wide dtype; 0 if nothing is."""
        held = self.held[i]
        if held is not None and held.dtype == self.wide:
            return held
        wide = self._new(self.ranges[i])
        if held is None:
            wide[...] = 0
        else:
            self.machine.copy(wide, held)
        return wide

    def result(self) -> Any:
        """The result: complete after the last contribution."""
        if self._whole is not None:
            return self._whole
        if self._result is None:
            self._result = self.machine.empty(self.shape, self.dtype)
            for own, count in zip(self.ranges, self.left, strict=True):
                if not count:
                    self._clear(own)
        return self._result

    def _clear(self, rows: range) -> None:
        """Rows without a contribution."""
        _rows(self._result, rows).fill(0)


class Merged(Sums):
    """Outputs merged by their lse; `lse` is (batch, heads, rows)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        batch, rows, heads, _ = self.shape
        self.lse = self.machine.empty((batch, heads, rows), self.wide)
        self.lse.fill(-np.inf)
        self._given: Any = None

    def merge(self, rows: range, out: Any, lse: Any) -> None:
        """Merge a contribution, and its lse (batch, heads, len(rows))."""
        if self.total == 1 and len(rows) == self.shape[1]:
            self._whole, self.lse = out, lse
            return
        self._given = rows, lse
        self.add(rows, out)

    def _add(self, i: int, part: range, array: Any) -> None:
        first = part == self.ranges[i] and self.held[i] is None
        super()._add(i, part, array)
        if first:
            self.lse[..., part.start : part.stop] = self._lse_of(part)

    def _combine(self, i: int, part: range, a: Any, b: Any, to: Any) -> None:
        own = self.lse[..., part.start : part.stop]
        self.machine.merge(a, own, b, self._lse_of(part), to)

    def _lse_of(self, part: range) -> Any:
        rows, lse = self._given
        return lse[..., part.start - rows.start : part.stop - rows.start]


def _overlap(a: range, b: range) -> range | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, stop) if start < stop else None


def _cut(array: Any, rows: range, part: range) -> Any:
    return array[:, part.start - rows.start : part.stop - rows.start]


def _rows(array: Any, rows: range) -> Any:
    return array[:, rows.start : rows.stop]
