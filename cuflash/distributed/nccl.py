"""A `Group` over NCCL, for CuPy arrays: one rank a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash.api import arrays as api_arrays
from cuflash.errors import GroupError

from .group import (
    DEFAULT_TIMEOUT,
    Group,
    Message,
    Pending,
    check_on_device,
)
from .nccl_library import library as find_library
from .watchdog import Watchdog

# CUDA takes the highest priority that there is if a number is below it.
_HIGHEST = -5


def unique_id(library: str | None = None) -> bytes:
    """A new id of a group, made by one rank and given to all.

    Parameters
    ----------
    library : {None, "cupy", "nccl4py"}, optional
        Bindings of NCCL.

    Returns
    -------
    bytes
    """
    return find_library(library).unique_id()


class NcclGroup(Group):
    """The ranks of an NCCL communicator, on CuPy's current device.

    Parameters
    ----------
    rank, size : int
    unique_id : bytes
        What `unique_id` returned on one rank.
    timeout : float, optional
        Seconds. If an exchange with other ranks takes longer, the group is
        aborted: work that waits for it on the GPU ends, with undefined
        results, and every later call raises GroupError.
    library : {None, "cupy", "nccl4py"}, optional
        Bindings of NCCL; CuPy's by default.

    Raises
    ------
    GroupError
        If the other ranks do not join in time.
    UnsupportedError
        If there is no NCCL.
    """

    checks_each_call = False

    def __init__(
        self,
        rank: int,
        size: int,
        unique_id: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        library: str | None = None,
    ) -> None:
        super().__init__(rank, size, timeout)
        self._library = find_library(library)
        self._cupy = api_arrays.on_cuda().cupy
        self.device = self._cupy.cuda.runtime.getDevice()
        # Its kernels go first where they compete with attention for SMs.
        self._stream = self._cupy.cuda.Stream(
            non_blocking=True, priority=_HIGHEST
        )
        self._watchdog = Watchdog(self.timeout, self._abort, self._bind)
        self._communicator: Any = self._within_timeout(
            lambda: self._library.join(self.size, unique_id, self.rank)
        )

    def mark(self) -> Any:
        return self._event(self._cupy.cuda.get_current_stream())

    def _event(self, stream: Any) -> Any:
        return stream.record(self._cupy.cuda.Event(disable_timing=True))

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        self.check()
        for array, _ in (*sends, *receives):
            check_on_device(
                array, self._cupy, self.device,
                "the group communicates by NCCL",
            )  # fmt: skip
        stream = self._stream
        stream.wait_event(self.mark() if after is None else after)
        watched = self._watchdog.begin()
        start = self._event(stream)
        try:
            self._library.exchange(
                self._communicator, sends, receives, stream.ptr
            )
        except Exception as error:  # the libraries' classes differ
            self._watchdog.dismiss(watched)
            self.check()
            raise GroupError(
                f"rank {self.rank}: NCCL failed: {error}"
            ) from error
        end = self._event(stream)
        self._watchdog.queued(watched, start, end)
        return _OnStream(self, end, (sends, receives))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        cupy = self._cupy
        own = cupy.asarray(np.frombuffer(data, np.uint8))
        parts = [
            own if rank == self.rank else cupy.empty_like(own)
            for rank in range(self.size)
        ]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._exchange(
            [(own, rank) for rank in others],
            [(parts[rank], rank) for rank in others],
            None,
        ).wait()
        self.synchronize()
        return [cupy.asnumpy(x).tobytes() for x in parts]

    def synchronize(self) -> None:
        """Wait for the current stream.

        Raises
        ------
        GroupError
            If the group was aborted.
        """
        event = self.mark()
        delay = 1e-5
        while not event.done:
            time.sleep(delay)
            delay = min(2 * delay, 1e-3)
        self.check()

    def check(self) -> None:
        """Raise GroupError if the group was aborted."""
        if self._watchdog.expired:
            raise GroupError(
                f"rank {self.rank} waited more than {self.timeout:g} s for "
                "another rank, and left the group: a rank died, made another "
                "call, or computes for longer than the timeout"
            )

    def close(self) -> None:
        """Leave the group; all ranks do so together."""
        self._watchdog.close()
        self._stream.synchronize()
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not self._watchdog.expired:
            communicator.destroy()

    def _bind(self) -> None:
        """Make the device that of the calling thread."""
        self._cupy.cuda.runtime.setDevice(self.device)

    def _abort(self) -> None:
        self._communicator.abort()

    def _within_timeout(self, function: Callable[[], Any]) -> Any:
        """Run a call that waits for other ranks, in a thread."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._bind()
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            raise GroupError(
                f"rank {self.rank} waited {self.timeout:g} s for {self.size} "
                "ranks to join the group"
            )
        if errors:
            raise GroupError(
                f"rank {self.rank} cannot join the group: {errors[0]}"
            ) from errors[0]
        return results[0]


class _OnStream:
    """The `Pending` of `NcclGroup`; keeps its arrays alive until `wait`."""

    def __init__(self, group: NcclGroup, end: Any, kept: Any) -> None:
        self._group, self._end, self._kept = group, end, kept

    def wait(self) -> None:
        self._group.check()
        cuda = self._group._cupy.cuda
        cuda.get_current_stream().wait_event(self._end)
        self._kept = None
