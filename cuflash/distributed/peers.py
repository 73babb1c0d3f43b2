"""A `Group` of processes on one machine whose GPUs read each other's memory.

What travels is copied by the GPUs' copy engines, which take no SMs from
attention: docs/internals/distributed.md says why that matters.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash.api import arrays as api_arrays
from cuflash.errors import (
    DTypeError,
    GroupError,
    UnsupportedError,
    ValueRangeError,
)

from .group import DEFAULT_TIMEOUT, Group, Message, Pending
from .mesh import Mesh
from .peer_memory import HANDLE_BYTES, Block, Blocks, Events, Opened

# Kinds of messages: arrays to copy; they are being copied; other bytes.
_ARRAYS, _COPIED, _BYTES = range(3)

_ARRAY = struct.Struct(f"<{HANDLE_BYTES}sQ")  # a block and an array's bytes

_Event = tuple[Any, bytes]  # and its handle


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
        On all ranks, if a GPU cannot read the memory of another.
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
        # Each rank's event after the copies that it has queued.
        self._done, handle = self._events.take()
        self._readers: dict[int, int] = {}
        try:
            self._meet(handle)
        except BaseException:
            self._mesh.close()
            raise

    def _meet(self, done: bytes) -> None:
        """Open the other ranks' events and a block of each."""
        block = self._blocks.take(1)
        told = self._mesh.gather(_BYTES, done + block.handle)
        failed = b""
        try:
            for rank, handles in enumerate(told):
                if rank != self.rank:
                    event, memory = (
                        handles[:HANDLE_BYTES], handles[HANDLE_BYTES:]
                    )  # fmt: skip
                    self._readers[rank] = self._opened.event(event)
                    self._opened.memory(memory)
        except Exception as error:  # CuPy's own class
            failed = f"rank {self.rank}: {error}".encode()
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
        stream = self._cupy.cuda.get_current_stream().ptr
        for event in block.after:
            runtime.streamWaitEvent(stream, event)
        runtime.memcpyAsync(
            block.memory.ptr, array.data.ptr, array.nbytes,
            runtime.memcpyDeviceToDevice, stream,
        )  # fmt: skip
        self._lent[block.memory.ptr] = block
        return block

    @property
    def _runtime(self) -> Any:
        return self._cupy.cuda.runtime

    def _check(self, array: Any) -> None:
        if not isinstance(array, self._cupy.ndarray):
            raise DTypeError(
                f"got an array of type {type(array).__name__}, expected a "
                "CuPy array: the group's GPUs copy it"
            )
        if array.data.device_id != self.device:
            raise ValueRangeError(
                f"got an array on CUDA device {array.data.device_id}, "
                f"expected device {self.device}, the group's"
            )

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Any
    ) -> Pending:
        for array, _ in (*sends, *receives):
            self._check(array)
        sent: dict[int, list[Block]] = {}
        told: dict[int, bytes] = {}
        for array, rank in sends:
            block = self._lent.get(array.data.ptr)
            if block is None:
                block, after = self._staged(array), None
            sent.setdefault(rank, []).append(block)
            told[rank] = told.get(rank, b"") + _ARRAY.pack(
                block.handle, array.nbytes
            )
        after = self.mark() if after is None else after
        self._sending.wait_event(after)
        ready = {rank: self._events.take() for rank in sent}
        for rank, (event, handle) in ready.items():
            self._sending.record(event)
            self._mesh.send(rank, _ARRAYS, handle + told[rank])
        return _Travelling(self, sent, ready, receives, after)

    def pull(self, rank: int, arrays: list[Any], after: Any) -> None:
        """Queue the copies of what a rank sends."""
        told = self._mesh.receive(rank, _ARRAYS)
        event, rest = told[:HANDLE_BYTES], told[HANDLE_BYTES:]
        found = list(_ARRAY.iter_unpack(rest))
        sizes = [x.nbytes for x in arrays]
        if [nbytes for _, nbytes in found] != sizes:
            raise GroupError(
                f"rank {self.rank} received arrays of "
                f"{[nbytes for _, nbytes in found]} bytes of rank {rank}, "
                f"expected {sizes}"
            )
        runtime, stream = self._runtime, self._receiving
        stream.wait_event(after)
        runtime.streamWaitEvent(stream.ptr, self._opened.event(event))
        for array, (handle, nbytes) in zip(arrays, found, strict=True):
            runtime.memcpyAsync(
                array.data.ptr, self._opened.memory(handle), nbytes,
                runtime.memcpyDefault, stream.ptr,
            )  # fmt: skip
        stream.record(self._done)
        self._mesh.send(rank, _COPIED, b"")

    def await_pull(self, rank: int, blocks: list[Block], ready: Any) -> None:
        """Wait until a rank has queued its copies of what this one sent."""
        self._mesh.receive(rank, _COPIED)
        self._events.give_back(ready)
        for block in blocks:
            block.readers.add(self._readers[rank])

    def arrived(self) -> None:
        """Let the current stream wait for all copies that are queued."""
        event = self._cupy.cuda.Event(disable_timing=True)
        self._receiving.record(event)
        self._cupy.cuda.get_current_stream().wait_event(event)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._mesh.gather(_BYTES, data)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        for stream in (self._sending, self._receiving):
            stream.synchronize()
        self._mesh.gather(_BYTES, b"")  # nobody reads this rank's memory
        self._opened.close()
        self._mesh.gather(_BYTES, b"")  # all have closed it: it can be freed
        self._mesh.close()


class _Travelling:
    """The `Pending` of `PeerGroup`: copies are queued by `wait`."""

    def __init__(
        self,
        group: PeerGroup,
        sent: dict[int, list[Block]],
        ready: dict[int, _Event],
        receives: Sequence[Message],
        after: Any,
    ) -> None:
        self._group, self._sent, self._ready = group, sent, ready
        self._receives: dict[int, list[Any]] = {}
        for array, rank in receives:
            self._receives.setdefault(rank, []).append(array)
        self._after = after

    def wait(self) -> None:
        for rank, arrays in self._receives.items():
            self._group.pull(rank, arrays, self._after)
        for rank, blocks in self._sent.items():
            self._group.await_pull(rank, blocks, self._ready[rank])
        self._group.arrived()
        self._sent, self._receives = {}, {}
