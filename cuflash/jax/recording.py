"""Records a call without its data: what XLA must allocate, what to launch.

`launch` runs a call on a `Recorder`, whose arrays are numbered slots. The
`Recording` keeps the kernels and their argument struct, in which only
addresses are missing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cuflash.backends.base import Backend, Target
from cuflash.launch.structs import TensorMap, pointers_of
from cuflash.plans import workspace
from cuflash.request.layouts import Boxes
from cuflash.request.problem import Call

from .abstract import Abstract

_OFFSET_BITS = 40  # an address is (slot + 1, offset)


@dataclass(frozen=True)
class Recording:
    """A call's launches, but for the addresses of its buffers.

    Attributes
    ----------
    created : tuple of Abstract
        The buffers to allocate, in the order of their slots, which follow
        those of the inputs.
    results : tuple of Abstract
        Those of `created` that hold the call's results.
    zeroed : tuple of (int, int)
        The slots and sizes in bytes of buffers to fill with 0 first.
    launches : tuple of _Launch
    """

    created: tuple[Abstract, ...]
    results: tuple[Abstract, ...]
    zeroed: tuple[tuple[int, int], ...]
    launches: tuple[_Launch, ...]

    def replay(self, addresses: list[int], seed: int, backend: Any) -> None:
        """Queue the launches on a backend's stream."""
        for slot, nbytes in self.zeroed:
            backend.clear(addresses[slot], nbytes)
        for launch in self.launches:
            launch.queue([*addresses, 0, seed], backend)


@dataclass(frozen=True)
class _Launch:
    """Loaded kernels and their argument struct.

    Attributes
    ----------
    loaded
    kind : dtype
    packed : struct.Struct
        The struct, of TensorMaps, pointers and the bytes between them.
    fields : tuple of int or bytes
        What it packs: TensorMaps and pointers by number, bytes as they are.
    pointers : tuple of (int, int)
        The slot of each pointer, and the offset in its buffer. Of a null
        pointer and of the seed, the slots are -2 and -1.
    maps : tuple of (int, Boxes)
        The index among `pointers` of each TensorMap's array.
    """

    loaded: Any
    kind: np.dtype
    packed: struct.Struct
    fields: tuple[int | bytes, ...]
    pointers: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, Boxes], ...]

    def queue(self, values: list[int], backend: Any) -> None:
        """Launch; `values` are the slots' addresses, then null, the seed."""
        pointers = [values[slot] + offset for slot, offset in self.pointers]
        encode = backend.tensor_map
        maps = [encode(pointers[index], boxes) for index, boxes in self.maps]
        found = [*maps, *pointers]
        arguments = self.packed.pack(
            *[x if isinstance(x, bytes) else found[x] for x in self.fields]
        )
        backend.launch(self.loaded, arguments, self.kind)


def record(
    run: Callable[[Call, Backend], tuple[Any, ...]],
    call: Call,
    num_inputs: int,
    base: Backend,
) -> Recording:
    """Record ``run(call, backend)``.

    Parameters
    ----------
    run : callable
        As a method of `launch.runner.Kernels`, of a backend.
    call : Call
        Its arrays are `Abstract`, with slots below `num_inputs`.
    num_inputs : int
    base : Backend
        The device for which kernels are planned and loaded.
    """
    recorder = Recorder(num_inputs, base)
    results = run(call, cast(Backend, recorder))
    return Recording(
        tuple(recorder.created),
        tuple(recorder.sources.get(x, x) for x in results if x is not None),
        tuple(recorder.zeroed),
        tuple(recorder.launches),
    )


class Recorder:
    """A `Backend` whose arrays are slots, and which queues nothing."""

    def __init__(self, num_inputs: int, base: Backend) -> None:
        self.created: list[Abstract] = []
        self.zeroed: list[tuple[int, int]] = []
        self.sources: dict[Abstract, Abstract] = {}
        self.launches: list[_Launch] = []
        self._num_inputs, self._base = num_inputs, base
        self._boxes: list[Boxes] = []

    @property
    def target(self) -> Target:
        return self._base.target

    def current(self) -> AbstractContextManager[Any]:
        return self._base.current()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Abstract:
        slot = self._num_inputs + len(self.created)
        array = Abstract(tuple(shape), np.dtype(dtype), slot)
        self.created.append(array)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Abstract:
        array = self.empty(shape, dtype)
        if array.nbytes:
            self.zeroed.append((array.slot, array.nbytes))
        return array

    def rows(
        self, shape: tuple[int, ...], dtype: Any, zero: bool = False
    ) -> Abstract:
        return self.zeros(shape, dtype) if zero else self.empty(shape, dtype)

    def copy(self, target: Abstract, source: Abstract) -> None:
        """XLA converts dtypes: the result is the source, unconverted."""
        assert self.created[-1] is target and target.shape == source.shape
        self.created.pop()
        self.sources[target] = source

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        total, offsets = workspace.side_by_side(nbytes)
        if not total:
            return None, [0] * len(nbytes)
        memory = self.empty((total,), np.uint8)
        (start,) = self.address([memory])
        return memory, [0 if x is None else start + x for x in offsets]

    def address(
        self, arrays: Iterable[Abstract | None], written: bool = False
    ) -> list[int]:
        return [0 if x is None else x.slot + 1 << _OFFSET_BITS for x in arrays]

    def tensor_map(self, address: int, boxes: Boxes) -> bytes:
        """Stands for a TensorMap: the address and the index of its boxes."""
        self._boxes.append(boxes)
        marker = struct.pack("=QQ", address, len(self._boxes) - 1)
        return marker.ljust(TensorMap.itemsize, b"\0")

    def stream(self) -> int:
        return 0

    def launch(self, loaded: Any, arguments: bytes, kind: Any) -> None:
        packed, fields, found = _taken_apart(arguments, kind)
        markers = [x for x in found if type(x) is bytes]
        addresses = found[len(markers) :]
        maps = []
        for marker in markers:
            address, index = struct.unpack_from("=QQ", marker)
            maps.append((addresses.index(address), self._boxes[index]))
        names = zip(pointers_of(kind), addresses, strict=True)
        self.launches.append(
            _Launch(
                loaded,
                kind,
                packed,
                fields,
                tuple(_slot(name, address) for name, address in names),
                tuple(maps),
            )
        )


def _taken_apart(
    arguments: bytes, kind: np.dtype
) -> tuple[struct.Struct, tuple[int | bytes, ...], list[Any]]:
    """How to pack a struct, and the TensorMaps and pointers in it."""
    form, end = "=", 0
    fields: list[int | bytes] = []
    found: list[Any] = []
    for offset, code in _addressed(kind):
        if offset > end:
            form += f"{offset - end}s"
            fields.append(arguments[end:offset])
        form += code
        fields.append(len(found))
        found += struct.unpack_from(f"={code}", arguments, offset)
        end = offset + struct.calcsize(f"={code}")
    fields.append(arguments[end:])
    form += f"{len(arguments) - end}s"
    return struct.Struct(form), tuple(fields), found


def _addressed(kind: np.dtype, start: int = 0) -> Iterator[tuple[int, str]]:
    """The offset and the format of each TensorMap and pointer, in order."""
    for inner, offset, *_ in (kind.fields or {}).values():
        if inner == TensorMap:
            yield start + offset, f"{TensorMap.itemsize}s"
        elif inner.base == np.uint64:  # one, or an array of them
            count = inner.shape[0] if inner.subdtype else 1
            for i in range(count):
                yield start + offset + 8 * i, "Q"
        else:
            yield from _addressed(inner, start + offset)


# 64 bits that are no address.
_NUMBERS = "mod_numbers", "cache_seqlen"


def _slot(name: str, address: int) -> tuple[int, int]:
    """The slot and the offset of a pointer; a number is one from null."""
    if name == "seed":
        return -1, 0
    if name.partition("[")[0] in _NUMBERS:
        return -2, address
    slot, offset = divmod(address, 1 << _OFFSET_BITS)
    return (slot - 1, offset) if address else (-2, 0)
