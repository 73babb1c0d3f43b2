"""Compiles kernels in parallel, and can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    wait,
)
from typing import Any

from cuflash.errors import CompileError


class Compiler:
    """Runs work(task) in threads, in order, each task once.

    Parameters
    ----------
    work : callable
    jobs : int
        Threads. NVRTC takes one core in each.
    """

    def __init__(self, work: Callable[[Any], Any], jobs: int) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(max(jobs, 1))
        self._tasks: dict[Hashable, Future] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: Any) -> None:
        # A process that ends while NVRTC is at work may crash: what has
        # begun is waited for (docs/internals/host.md, "Compiling at import").
        self._pool.shutdown(cancel_futures=True)

    def submit(self, tasks: Iterable[Hashable]) -> None:
        """Queue tasks after those already submitted."""
        for task in tasks:
            found = self._tasks.get(task)
            if found is None or found.cancelled():
                self._tasks[task] = self._pool.submit(self._work, task)

    def results(
        self, tasks: list[Hashable], until: float
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result) as tasks finish; a CompileError is a result.

        Tasks not started by the time `until` (of `time.monotonic`) are
        dropped.

        Raises
        ------
        OSError
            If the cache folder cannot be written to.
        """
        self.submit(tasks)
        left = {self._tasks[task]: task for task in tasks}
        while left:
            if time.monotonic() >= until:
                for future in [x for x in left if x.cancel()]:
                    del left[future]
            # Short waits, so that Ctrl-C takes effect.
            done, _ = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                task, error = left.pop(future), future.exception()
                if error and not isinstance(error, CompileError):
                    raise error
                yield task, error or future.result()
