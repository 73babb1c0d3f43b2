"""Memory and events that the processes of one machine share, by CUDA IPC."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

# CUDA shares whole pages of this size, whatever else they hold.
_LEAST = 2 * 2**20

HANDLE_BYTES = 64  # of memory and of an event


class Block:
    """A piece of shared memory while it is used.

    Attributes
    ----------
    memory, handle
        It, and what other processes open it by.
    """

    def __init__(self, blocks: Blocks, memory: Any, handle: bytes) -> None:
        self._blocks = blocks
        self.memory, self.handle = memory, handle

    def __del__(self) -> None:
        self._blocks.free[self.memory.size].append((self.memory, self.handle))


class Blocks:
    """Memory that other processes have opened, so it is never freed.

    Sizes are powers of two, so that sequences of all lengths share it.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        # By size: memory and its handle.
        self.free: dict[int, list[tuple[Any, bytes]]] = defaultdict(list)

    def take(self, nbytes: int) -> Block:
        """A block of at least so many bytes."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        if self.free[size]:
            return Block(self, *self.free[size].pop())
        memory = self._new(size)
        handle = self._cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)
        return Block(self, memory, handle)

    def _new(self, size: int) -> Any:
        cuda = self._cupy.cuda
        try:
            return cuda.Memory(size)
        except cuda.runtime.CUDARuntimeError:  # CuPy's pool may hold some
            self._cupy.get_default_memory_pool().free_all_blocks()
            return cuda.Memory(size)


class Events:
    """Events that other processes wait for; used again when they have."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._free: list[tuple[Any, bytes]] = []

    def take(self) -> tuple[Any, bytes]:
        """An event and what other processes open it by."""
        if self._free:
            return self._free.pop()
        cuda = self._cupy.cuda
        event = cuda.Event(disable_timing=True, interprocess=True)
        return event, cuda.runtime.ipcGetEventHandle(event.ptr)

    def give_back(self, event: tuple[Any, bytes]) -> None:
        """The streams that wait for an event have been told to."""
        self._free.append(event)


class Opened:
    """What other processes have shared, each opened once."""

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        self._memory: dict[bytes, int] = {}
        self._events: dict[bytes, int] = {}

    def memory(self, handle: bytes) -> int:
        """The address of a block."""
        if handle not in self._memory:
            self._memory[handle] = self._runtime.ipcOpenMemHandle(handle)
        return self._memory[handle]

    def event(self, handle: bytes) -> int:
        """The address of an event."""
        if handle not in self._events:
            self._events[handle] = self._runtime.ipcOpenEventHandle(handle)
        return self._events[handle]

    def close(self) -> None:
        """Close all."""
        for address in self._memory.values():
            self._runtime.ipcCloseMemHandle(address)
        for event in self._events.values():
            self._runtime.eventDestroy(event)
        self._memory.clear()
        self._events.clear()
