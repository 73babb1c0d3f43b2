"""A `Group` of processes on one machine whose GPUs read each other's memory.

What travels is copied by the GPUs' copy engines, which take no SMs from
attention: docs/internals/distributed.md says why that matters.
"""

from __future__ import annotations

import math
import struct
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuflash.api import arrays as api_arrays
from cuflash.errors import GroupError, UnsupportedError

from .group import (
    DEFAULT_TIMEOUT,
    Group,
    Message,
    Pending,
    check_on_device,
)
from .mesh import Mesh
from .peer_memory import HANDLE_BYTES, Block, Blocks, Events, Opened

# Kinds of messages: arrays to copy; they are being copied; other bytes.
_ARRAYS, _COPIED, _BYTES = range(3)

_ARRAY = struct.Struct(f"<{HANDLE_BYTES}sQ")  # a block and an array's bytes


class PeerGroup(Group):
    """The processes of one machine, each on CuPy's current device.

    A rank puts what it sends into memory that the others can read, and they
    copy it from there. That memory is kept until `close`.

    Parameters
    ----------
    rank, size : int
    folder : str or Path
        A name that all ranks know and no other group uses, on a local disk,
        of at most 90 bytes. While ranks join it is a folder.
    timeout : float, optional
        Seconds that a rank waits for another.

    Raises
    ------
    GroupError
        If the other ranks do not join in time.
    UnsupportedError
        On all ranks, if a GPU cannot read the memory of another, or if the
        folder cannot hold sockets; on Windows.
    """

    checks_each_call = False
    launches_first = True

    def __init__(
        self,
        rank: int,
        size: int,
        folder: str | Path,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(rank, size, timeout)
        if sys.platform == "win32":
            raise UnsupportedError(
                "Windows has no sockets between its processes: use WSL 2, or "
                "one GPU"
            )
        cupy = self._cupy = api_arrays.on_cuda().cupy
        self.device = cupy.cuda.runtime.getDevice()
        self._blocks, self._events = Blocks(cupy), Events(cupy)
        self._opened = Opened(cupy)
        # What is in use, by address.
        self._lent: weakref.WeakValueDictionary[int, Block] = (
            weakref.WeakValueDictionary()
        )
        # One stream would let the copies of a step wait for what is sent in
        # a later one.
        self._sending, self._receiving = (
            cupy.cuda.Stream(non_blocking=True) for _ in range(2)
        )
        self._mesh = Mesh(self.rank, self.size, Path(folder), self.timeout)
        # Exchanges with each rank until now.
        self._sends: Counter[int] = Counter()
        self._receives: Counter[int] = Counter()
        # After the copies from each rank, and theirs from this one.
        self._done: dict[int, Any] = {}
        self._readers: dict[int, int] = {}
        self._staging: int | None = None  # the stream of the last copy
        try:
            self._meet()
        except BaseException:
            self._opened.close()
            self._mesh.close()
            raise

    def _meet(self) -> None:
        """Open an event and a block of each other rank."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        handles = dict.fromkeys(others, b"")  # so, if this rank has none
        failed = b""
        try:
            block = self._blocks.take(1)
            for rank in others:
                self._done[rank], event = self._events.take()
                handles[rank] = event + block.handle
        except Exception as error:  # CuPy's own class
            failed = f"rank {self.rank}: {error}".encode()
        for rank in others:
            self._mesh.send(rank, _BYTES, handles[rank])
        told = {rank: self._mesh.receive(rank, _BYTES) for rank in others}
        try:
            for rank, both in told.items():
                if both:
                    event, memory = both[:HANDLE_BYTES], both[HANDLE_BYTES:]
                    self._readers[rank] = self._opened.event(event)
                    self._opened.memory(memory)
        except Exception as error:
            failed = failed or f"rank {self.rank}: {error}".encode()
        failures = [x for x in self._mesh.gather(_BYTES, failed) if x]
        if failures:
            raise UnsupportedError(
                "the GPUs cannot read each other's memory "
                f"({failures[0].decode()}): use NCCL"
            )

    def mark(self) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        return self._cupy.cuda.get_current_stream().record(event)

    def sendable(self, array: Any) -> Any:
        self._check(array)
        if not array.size:
            return array
        block = self._staged(array)
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(
            block.memory.ptr, block.memory.size, block, self.device
        )
        pointer = cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(array.shape, array.dtype, pointer)

    def _staged(self, array: Any) -> Block:
        """A block with an array's bytes.

        Copied by the current stream: such a copy may need SMs, which it would
        not get on another one while attention holds all.
        """
        block, runtime = self._blocks.take(array.nbytes), self._runtime
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr != self._staging:  # another has waited for the readers
            for event in self._readers.values():
                runtime.streamWaitEvent(stream.ptr, event)
            self._staging = stream.ptr
        runtime.memcpyAsync(
            block.memory.ptr, array.data.ptr, array.nbytes,
            runtime.memcpyDeviceToDevice, stream.ptr,
        )  # fmt: skip
        self._lent[block.memory.ptr] = block
        return block

    @property
    def _runtime(self) -> Any:
        return self._cupy.cuda.runtime

    def _check(self, array: Any) -> None:
        reason = "the group's GPUs copy it"
        check_on_device(array, self._cupy, self.device, reason)

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        sent: dict[int, _Sent] = {}
        received: dict[int, _Received] = {}
        for array, rank in sends:
            self._check(array)
            block = self._lent.get(array.data.ptr)
            if block is None:
                block, after = self._staged(array), None
            if rank not in sent:
                sent[rank] = _Sent(self._sends[rank], self._events.take())
                self._sends[rank] += 1
            sent[rank].blocks.append((block, array.nbytes))
        for array, rank in receives:
            self._check(array)
            if rank not in received:
                received[rank] = _Received(self._receives[rank])
                self._receives[rank] += 1
            received[rank].arrays.append(array)
        after = self.mark() if after is None else after
        self._sending.wait_event(after)
        for rank, of_rank in sent.items():
            self._sending.record(of_rank.ready[0])
            self._mesh.send(rank, _ARRAYS, of_rank.message(), of_rank.number)
        return _Travelling(self, sent, received, after)

    def pull(self, rank: int, expected: _Received, after: Any) -> None:
        """Queue the copies of what a rank sends."""
        told = self._mesh.receive(rank, _ARRAYS, expected.number)
        event, rest = told[:HANDLE_BYTES], told[HANDLE_BYTES:]
        handles, found = zip(*_ARRAY.iter_unpack(rest), strict=True)
        sizes = tuple(x.nbytes for x in expected.arrays)
        if found != sizes:
            raise GroupError(
                f"rank {self.rank} received arrays of {found} bytes of rank "
                f"{rank}, expected {sizes}"
            )
        runtime, stream = self._runtime, self._receiving
        stream.wait_event(after)
        runtime.streamWaitEvent(stream.ptr, self._opened.event(event))
        for array, handle in zip(expected.arrays, handles, strict=True):
            runtime.memcpyAsync(
                array.data.ptr, self._opened.memory(handle), array.nbytes,
                runtime.memcpyDefault, stream.ptr,
            )  # fmt: skip
        stream.record(self._done[rank])
        self._mesh.send(rank, _COPIED, b"", expected.number)

    def await_pull(self, rank: int, sent: _Sent) -> None:
        """Let the current stream wait for a rank's copies of what it got.

        Then blocks may be written again, and this process may end.
        """
        self._mesh.receive(rank, _COPIED, sent.number)
        self._events.give_back(sent.ready)
        stream = self._cupy.cuda.get_current_stream()
        self._runtime.streamWaitEvent(stream.ptr, self._readers[rank])

    def arrived(self) -> None:
        """Let the current stream wait for all copies that are queued."""
        event = self._cupy.cuda.Event(disable_timing=True)
        self._receiving.record(event)
        self._cupy.cuda.get_current_stream().wait_event(event)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._mesh.gather(_BYTES, data)

    def synchronize(self) -> None:
        """Wait for the current stream.

        Raises
        ------
        GroupError
            If it does not end in time after another rank has left.
        """
        event, delay, late = self.mark(), 1e-5, math.inf
        while not event.done:
            time.sleep(delay)
            delay = min(2 * delay, 1e-3)
            if late == math.inf and self._mesh.left() is not None:
                late = time.monotonic() + self.timeout
            if time.monotonic() > late:
                raise GroupError(
                    f"rank {self.rank} waited {self.timeout:g} s for what "
                    f"rank {self._mesh.left()} sends, which has left the group"
                )

    def close(self) -> None:
        for stream in (self._sending, self._receiving):
            stream.synchronize()
        self._mesh.gather(_BYTES, b"")  # nobody reads this rank's memory
        self._opened.close()
        self._mesh.gather(_BYTES, b"")  # all have closed it: it can be freed
        self._mesh.close()


@dataclass
class _Sent:
    """What one exchange sends to a rank.

    Attributes
    ----------
    number : int
        Of the exchanges that send to it.
    ready : (event, bytes)
        When the blocks may be read, and its handle.
    blocks : list of (Block, int)
        With the bytes of each array.
    """

    number: int
    ready: tuple[Any, bytes]
    blocks: list[tuple[Block, int]] = field(default_factory=list)

    def message(self) -> bytes:
        """What the rank needs to know."""
        arrays = (_ARRAY.pack(x.handle, nbytes) for x, nbytes in self.blocks)
        return self.ready[1] + b"".join(arrays)


@dataclass
class _Received:
    """What one exchange receives of a rank; numbered as `_Sent`."""

    number: int
    arrays: list[Any] = field(default_factory=list)


class _Travelling:
    """The `Pending` of `PeerGroup`: copies are queued by `wait`."""

    def __init__(
        self,
        group: PeerGroup,
        sent: dict[int, _Sent],
        received: dict[int, _Received],
        after: Any,
    ) -> None:
        self._group, self._after = group, after
        self._sent, self._received = sent, received

    def wait(self) -> None:
        for rank, received in self._received.items():
            self._group.pull(rank, received, self._after)
        for rank, sent in self._sent.items():
            self._group.await_pull(rank, sent)
        self._group.arrived()
        self._sent, self._received = {}, {}
