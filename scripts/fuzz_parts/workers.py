"""Processes that run units, each with its own cache of kernels.

A process may die with its GPU's context, or hang in a kernel that waits for
ever: both are findings, and another process takes its place.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .units import Done, run

# The emulator stops a kernel after 120 s; on a GPU a problem has up to four
# kernels to compile, the largest of which take half a minute.
LONGEST = 200.0  # seconds of one problem
OFTEN = 0.5  # seconds between looks at the processes
CONTEXT = multiprocessing.get_context("spawn")


class Worker:
    """One process, and the problem that it works on."""

    def __init__(self, on: str, shared: tuple[Any, ...], folder: Path) -> None:
        self.at = CONTEXT.Array("q", [-1, -1])  # seed and number
        self.since = time.monotonic()
        self.last = (-1, -1)
        self.process = CONTEXT.Process(
            target=_work, args=(on, self.at, *shared, str(folder)), daemon=True
        )
        self.process.start()

    def fate(self) -> str:
        """Say how the process ended or that it hangs; else nothing."""
        at = tuple(self.at[:])
        if at != self.last:
            self.last, self.since = at, time.monotonic()
        code = self.process.exitcode
        if code is None:
            hangs = time.monotonic() - self.since > LONGEST
            return f"did not end within {LONGEST:g} s" * hangs
        if code == 0:
            return ""
        name = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"its process died of {name}"

    def name(self) -> str:
        return f"{self.last[0]}/{self.last[1]}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def running(on: str, first: int, jobs: int) -> Iterator[Iterator[Done | None]]:
    """Yield an endless iterator of problems that are done; None if none is.

    The processes end with the ``with`` block.
    """
    stop = CONTEXT.Event()
    done: Any = CONTEXT.Queue()
    counter = CONTEXT.Value("q", first)
    with scratch() as folder:
        shared = done, counter, stop
        workers = [
            Worker(on, shared, Path(folder) / str(i)) for i in range(jobs)
        ]
        try:
            yield _results(on, done, shared, workers, Path(folder))
        finally:
            stop.set()
            for worker in workers:
                worker.end()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for caches; compilers that outlive us may still write to it."""
    return tempfile.TemporaryDirectory(
        prefix="cuflash_fuzz_", ignore_cleanup_errors=True
    )


def _results(
    on: str,
    done: Any,
    shared: tuple[Any, ...],
    workers: list[Worker],
    folder: Path,
) -> Iterator[Done | None]:
    looked = time.monotonic()
    while True:
        try:
            yield done.get(timeout=OFTEN)
        except queue.Empty:
            yield None
        if time.monotonic() - looked < OFTEN:
            continue
        looked = time.monotonic()
        for i, worker in enumerate(workers):
            fate = worker.fate()
            if fate:
                worker.end()
                yield Done(worker.name(), {}, fate)
            if worker.process.exitcode is not None:
                workers[i] = Worker(on, shared, folder / str(i))


def _work(
    on: str, at: Any, done: Any, counter: Any, stop: Any, folder: str
) -> None:
    """Run units until told to stop; end if the GPU's context is broken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    set_up(on, folder)
    backend = make(on)
    while not stop.is_set():
        with counter.get_lock():
            seed = counter.value
            counter.value += 1

        def starts(index: int, seed: int = seed) -> None:
            at[:] = [seed, index]

        for result in run(on, backend, seed, starts=starts):
            done.put(result)
            if result.broken:
                done.close()
                done.join_thread()
                return
            if stop.is_set():
                break
        if on == "emulator":
            backend.executable.cache_clear()
            forget_programs(Path(folder))


def set_up(on: str, folder: str) -> None:
    """Choose a cache, before CuPy is imported; on a GPU all share one."""
    kept = folder if on == "emulator" else str(Path(folder).parent / "gpu")
    os.environ["CUPY_CACHE_DIR"] = kept


def make(on: str) -> Any:
    """Return the backend."""
    from .checking import OnEmulator, OnGPU

    return OnEmulator() if on == "emulator" else OnGPU()


def forget_programs(folder: Path) -> None:
    """Delete emulated kernels, not the engine: each unit has its own."""
    for path in (folder / "cuflash_emulator").glob("*"):
        if not path.name.startswith("engine_"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
