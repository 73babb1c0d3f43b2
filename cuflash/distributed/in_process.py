"""Ranks as threads of one process: on one device, for tests, or on several."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash.errors import GroupError, ValueRangeError

from .group import DEFAULT_TIMEOUT, Group, Message, Pending, digest


@dataclass(eq=False)
class _Parcel:
    """An array under way.

    Attributes
    ----------
    array : array
    ready : event or None
        Of a GPU: when the array may be read.
    taken : bool
        Whether the copy is made, or queued on a GPU.
    done : event or None
        Of a GPU: when the copy is made.
    """

    array: Any
    ready: Any = None
    taken: bool = False
    done: Any = None


@dataclass(eq=False)
class _Board:
    """What the ranks of a group share."""

    size: int
    timeout: float
    shares_device: bool = True
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: tuple[int, BaseException] | None = None
    parcels: dict[tuple[int, int, int], _Parcel] = field(default_factory=dict)
    rounds: dict[int, dict[int, bytes]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def wait_for(self, rank: int, what: str, come: Callable[[], Any]) -> Any:
        """What `come` returns once it is true; the lock is held."""
        deadline = time.monotonic() + self.timeout
        while not (found := come()):
            if self.failed:
                other, error = self.failed
                raise GroupError(
                    f"rank {rank} waits for {what}, but rank {other} failed: "
                    f"{type(error).__name__}: {error}"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise GroupError(
                    f"rank {rank} waited {self.timeout:g} s for {what}"
                )
            self.changed.wait(left)
        return found

    def fail(self, rank: int, error: BaseException) -> None:
        """Record that a rank ended with an error; the first one counts."""
        with self.changed:
            self.failed = self.failed or (rank, error)
            self.changed.notify_all()


class InProcessGroup(Group):
    """A rank that is a thread: see `run`."""

    launches_first = True

    def __init__(self, rank: int, board: _Board) -> None:
        super().__init__(rank, board.size, board.timeout)
        self._board = board
        self.shares_device = board.shares_device
        self._round = 0
        self._given: str | None = None  # the call that is to be confirmed
        # How many arrays were sent to, and are expected of, each rank.
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()
        self._stream: Any = None  # of copies; made for the first CuPy array

    def mark(self) -> Any:
        cupy = _cupy()
        return (
            None if cupy is None else cupy.cuda.get_current_stream().record()
        )

    def synchronize(self) -> None:
        cupy = _cupy()
        if cupy is not None:
            cupy.cuda.get_current_stream().synchronize()

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        if after is None:
            after = self.mark()
        sent = []
        with self._board.changed:
            for array, rank in sends:
                parcel = _Parcel(array, after)
                key = self.rank, rank, self._sent[rank]
                self._sent[rank] += 1
                self._board.parcels[key] = parcel
                sent.append((parcel, rank))
            self._board.changed.notify_all()
        expected = []
        for array, rank in receives:
            expected.append((array, rank, self._expected[rank]))
            self._expected[rank] += 1
        return _Travelling(self, sent, expected, after)

    def take(self, rank: int, number: int) -> _Parcel:
        """The array of a rank that it sent after `number` others."""
        board, key = self._board, (rank, self.rank, number)
        with board.changed:
            board.wait_for(
                self.rank,
                f"an array of rank {rank}",
                lambda: key in board.parcels,
            )
            return board.parcels.pop(key)

    def copy(self, parcel: _Parcel, to: Any, after: Any) -> None:
        """Copy an array that another rank sent."""
        if parcel.array.nbytes != to.nbytes:
            raise GroupError(
                f"rank {self.rank} received an array {parcel.array.shape}, "
                f"expected {to.shape}"
            )
        if isinstance(to, np.ndarray):
            to[...] = parcel.array.reshape(to.shape)
        else:
            parcel.done = self._copy_on_device(parcel, to, after)
        with self._board.changed:
            parcel.taken = True
            self._board.changed.notify_all()

    def _copy_on_device(self, parcel: _Parcel, to: Any, after: Any) -> Any:
        cuda: Any = _cupy()
        cuda = cuda.cuda
        if self._stream is None:
            self._stream = cuda.Stream(non_blocking=True)
        stream = self._stream
        for event in (parcel.ready, after):
            stream.wait_event(event)
        # Between devices copy engines do it, which need no SMs.
        cuda.runtime.memcpyAsync(
            to.data.ptr, parcel.array.data.ptr, to.nbytes,
            cuda.runtime.memcpyDefault, stream.ptr,
        )  # fmt: skip
        return stream.record()

    def await_taken(self, parcel: _Parcel, rank: int) -> None:
        """Wait until another rank has an array."""
        with self._board.changed:
            self._board.wait_for(
                self.rank,
                f"rank {rank} to take an array",
                lambda: parcel.taken,
            )

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.confirm()
        self._give(data)
        return self._collect()

    def _give(self, data: bytes) -> None:
        """Show bytes to the other ranks; `_collect` comes next."""
        board = self._board
        with board.changed:
            board.rounds[self._round][self.rank] = data
            board.changed.notify_all()

    def _collect(self) -> list[bytes]:
        """The bytes that all ranks gave."""
        board = self._board
        with board.changed:
            given = board.rounds[self._round]
            board.wait_for(
                self.rank,
                "the calls of all ranks",
                lambda: len(given) == self.size,
            )
            board.rounds.pop(self._round - 2, None)  # all have read it
            self._round += 1
            return [given[rank] for rank in range(self.size)]

    def agree(self, text: str) -> None:
        # Ranks take turns on one device and in one interpreter: a rank that
        # does not wait for the others here has launched its first kernel
        # before they have checked their calls.
        self.confirm()
        if self.size > 1:
            self._given = text
            self._give(digest(text))

    def confirm(self) -> None:
        text, self._given = self._given, None
        if text is not None:
            self._compare(text, self._collect())


class _Travelling:
    """The `Pending` of `InProcessGroup`: copies are made by `wait`."""

    def __init__(
        self,
        group: InProcessGroup,
        sent: list[tuple[_Parcel, int]],
        receives: list[tuple[Any, int, int]],
        after: Any,
    ) -> None:
        self._group, self._sent = group, sent
        self._receives, self._after = receives, after

    def wait(self) -> None:
        self._group.confirm()
        parcels = []
        for array, rank, number in self._receives:
            parcel = self._group.take(rank, number)
            self._group.copy(parcel, array, self._after)
            parcels.append(parcel)
        for parcel, rank in self._sent:
            self._group.await_taken(parcel, rank)
            parcels.append(parcel)
        self._sent, self._receives = [], []
        for parcel in parcels:
            if parcel.done is not None:
                stream = self._group_stream()
                stream.wait_event(parcel.done)

    @staticmethod
    def _group_stream() -> Any:
        cupy: Any = _cupy()
        return cupy.cuda.get_current_stream()


def _cupy() -> Any:
    """CuPy if the caller has imported it and there is a GPU."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def run(
    size: int,
    function: Callable[[Group], Any],
    *,
    devices: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Run a function on `size` ranks, each a thread of this process.

    Parameters
    ----------
    size : int
    function : callable
        Takes its rank's group. On a GPU it runs with a stream of its own,
        which begins after the caller's stream, and which that waits for.
    devices : sequence of int, optional
        The CUDA device of each rank, by default the current one. What travels
        between devices is copied directly where they can read each other's
        memory, as by NVLink.
    timeout : float, optional
        Seconds that a rank waits for another.

    Returns
    -------
    list
        The function's results, by rank.

    Raises
    ------
    Exception
        The first error of a rank. The others then raise GroupError, if they
        wait for it.

    Examples
    --------
    >>> from cuflash.distributed import run_threads
    >>> run_threads(2, lambda group: group.rank)
    [0, 1]
    """
    if devices is not None and len(devices) != size:
        raise ValueRangeError(
            f"devices has {len(devices)} elements, expected {size}"
        )
    shares = devices is None or len({*devices}) == 1
    board = _Board(size, timeout, shares)
    results: list[Any] = [None] * size
    groups = [InProcessGroup(rank, board) for rank in range(size)]
    with _streams(size, devices) as streams:

        def work(rank: int) -> None:
            try:
                with streams[rank]:
                    results[rank] = function(groups[rank])
            except BaseException as error:
                board.fail(rank, error)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(work, rank)
            )
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if board.failed:
        raise board.failed[1]
    return results


@contextlib.contextmanager
def _streams(
    size: int, devices: Sequence[int] | None
) -> Iterator[list[contextlib.AbstractContextManager]]:
    """For each rank the context in which it runs."""
    cupy = _cupy()
    if cupy is None:
        yield [contextlib.nullcontext() for _ in range(size)]
        return
    cuda = cupy.cuda
    own = cuda.get_current_stream()
    start = own.record()
    devices = [cuda.Device().id] * size if devices is None else devices
    _connect(cuda.runtime, sorted({*devices}))
    streams = []
    for device in devices:
        with cuda.Device(device):
            streams.append(cuda.Stream(non_blocking=True))

    @contextlib.contextmanager
    def within(device: int, stream: Any) -> Iterator[None]:
        with cuda.Device(device), stream:
            stream.wait_event(start)
            yield

    try:
        yield [within(*pair) for pair in zip(devices, streams, strict=True)]
    finally:
        for device, stream in zip(devices, streams, strict=True):
            with cuda.Device(device):
                end = stream.record()
            own.wait_event(end)


def _connect(runtime: Any, devices: Sequence[int]) -> None:
    """Let devices read each other's memory where they can."""
    before = runtime.getDevice()
    try:
        for device in devices:
            runtime.setDevice(device)
            for other in devices:
                if other != device and runtime.deviceCanAccessPeer(
                    device, other
                ):
                    runtime._deviceEnsurePeerAccess(other)
    finally:
        runtime.setDevice(before)
