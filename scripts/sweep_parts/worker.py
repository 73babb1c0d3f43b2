"""The child process that uses the GPU, and its parent's interface to it.

A faulty tile may hang, or leave the CUDA context unusable: then the child is
killed, and a new one continues. The parent never uses CUDA.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 120.0  # CuPy, a context, and the GPU's own start
# More for a child's first answer: CuPy compiles its own kernels.
FIRST_SECONDS = 60.0


class TileFault(Exception):
    """A tile that cannot be timed; the message says why."""


class NoGpu(Exception):
    """There is no GPU; the message says why."""


def open_gpu() -> Any:
    """Return the object that serves requests in the child."""
    from .gpu import Gpu

    return Gpu()


def serve(link: Connection, make: Callable[[], Any]) -> None:
    """Answer requests (method, arguments) until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        served = make()
    except Exception as error:
        link.send(("none", str(error)))
        return
    link.send(("ready", None))
    while True:
        try:
            method, arguments = link.recv()
        except EOFError:
            return
        try:
            link.send(("done", getattr(served, method)(*arguments)))
        except Exception as error:
            link.send(("fault", _line(error)))


def _line(error: Exception) -> str:
    text = str(error).strip() or traceback.format_exc().strip()
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


class Worker:
    """A child process, restarted after each fault."""

    def __init__(self, make: Callable[[], Any] = open_gpu) -> None:
        self._make = make
        self._context = multiprocessing.get_context("spawn")
        self._child = self._link = None
        self._extra = 0.0  # seconds

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Return the result of a method in the child.

        Raises
        ------
        NoGpu
            If the child found none.
        TileFault
            If the method raised, the child died, or `seconds` went by.
            The next request gets a new child.
        """
        if self._child is None:
            self._start()
        self._link.send((method, arguments))
        kind, answer = self._answer(seconds + self._extra)
        self._extra = 0.0
        if kind != "done":
            self.stop()
            raise TileFault(answer)
        return answer

    def stop(self) -> None:
        """Kill the child process."""
        if self._child is not None:
            self._link.close()
            self._child.kill()
            self._child.join()
        self._child = self._link = None

    def _start(self) -> None:
        self._link, theirs = self._context.Pipe()
        self._child = self._context.Process(
            target=serve, args=(theirs, self._make), daemon=True
        )
        self._child.start()
        theirs.close()
        kind, answer = self._answer(START_SECONDS)
        if kind != "ready":
            self.stop()
            raise NoGpu(answer)
        self._extra = FIRST_SECONDS

    def _answer(self, seconds: float) -> tuple[str, Any]:
        try:
            if self._link.poll(seconds):
                return self._link.recv()
            return "late", f"no end after {seconds:.0f} s"
        except (EOFError, OSError):
            self._child.join(1)
            return "dead", f"the process ended, {self._child.exitcode}"
