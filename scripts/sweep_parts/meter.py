"""Progress and time left of a sweep: a bar, or lines in a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench_parts.report import say

SAY_EVERY = 10.0  # seconds, where there is no bar


class Meter:
    """Counts steps of `total`; a context manager."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done = total, what, 0
        self._bar = self._task = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task(what, total=total)
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Meter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, count: int = 1, what: str | None = None) -> None:
        """Count steps, and show the current activity."""
        self.done += count
        self.what = what or self.what
        if self._bar:
            self._bar.update(self._task, advance=count, description=self.what)
        elif time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            say(self.line())

    def line(self) -> str:
        """The progress as text."""
        seconds = time.monotonic() - self._start
        left = ""
        if self.done:
            rest = seconds / self.done * (self.total - self.done)
            left = f", about {rest:.0f} s left"
        return (
            f"{self.what}: {self.done} of {self.total} after {seconds:.0f} s"
            f"{left}"
        )
