"""Ends exchanges of NCCL that take too long, since NCCL itself waits forever.

A kernel of NCCL whose peer has died never ends, and everything that is queued
behind it waits. A thread watches the exchanges under way. When one has run for
longer than the timeout, it aborts the communicator, which ends the kernel.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Watched:
    """An exchange: events before and after it on its stream.

    They are None while the host is still queueing it, which also waits for
    the peer when a connection is made.
    """

    start: Any = None
    end: Any = None
    since: float | None = None


class Watchdog:
    """Calls a function once if an exchange takes longer than a timeout.

    Parameters
    ----------
    timeout : float
        In seconds. It counts from when an exchange starts on its stream, not
        from when it is queued behind others.
    abort : callable
        Called in the watchdog's thread.
    enter : callable, optional
        Called when that thread starts.
    """

    def __init__(
        self,
        timeout: float,
        abort: Callable[[], None],
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout, self._abort, self._enter = timeout, abort, enter
        self.expired = False
        self._watched: deque[_Watched] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> _Watched:
        """Watch an exchange that the host now queues."""
        watched = _Watched(since=time.monotonic())
        with self._changed:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cuflash-nccl", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return watched

    def queued(self, watched: _Watched, start: Any, end: Any) -> None:
        """The host has queued an exchange between two events."""
        with self._changed:
            watched.start, watched.end, watched.since = start, end, None

    def dismiss(self, watched: _Watched) -> None:
        """Forget an exchange that could not be queued."""
        with self._changed:
            if watched in self._watched:
                self._watched.remove(watched)

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while not self._watched and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._expire(time.monotonic())
                if self.expired:
                    break
            time.sleep(min(0.2, self.timeout / 10))
        self._abort()

    def _expire(self, now: float) -> None:
        """Forget what has ended; find out whether the rest is in time."""
        while self._watched:
            first = self._watched[0]
            if first.end is not None:
                if first.end.done:
                    self._watched.popleft()
                    continue
                if first.since is None and first.start.done:
                    first.since = now
            late = first.since is not None and now - first.since > self.timeout
            self.expired = self.expired or late
            return
