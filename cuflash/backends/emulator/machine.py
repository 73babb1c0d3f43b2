"""An emulated GPU, which runs calls on NumPy arrays with the kernels.

To run a custom kernel::

    kernel = KernelPlan("/path/add.cu", "add", (("SIZE", 32),), threads=32,
                        shared_bytes=0)
    with cuflash.emulator.active() as emulated:
        emulated.launch(kernel, 1, x=x, y=y, count=32)
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.backends.emulator import faults, memory, runtime
from cuflash.build import nvrtc
from cuflash.errors import UnsupportedError
from cuflash.launch.c_structs import padded
from cuflash.launch.structs import TensorMap
from cuflash.plans import plan as planning
from cuflash.plans.plan import Device, FamilyName, KernelPlan, Launch, Plan
from cuflash.request.layouts import Boxes

ALIGNMENT = 256  # bytes, like CUDA's allocator
# What each byte of new memory holds. Bytes 0xFF are NaN in every dtype, so
# unwritten elements show; as integers they are -1, which may not.
UNWRITTEN = 0xFF


@dataclass(frozen=True)
class BoxesOf:
    """Stands for a TensorMap of a 4-D array: boxes of `rows` tokens."""

    array: np.ndarray
    rows: int


@dataclass(frozen=True, eq=False)
class Emulator:
    """A GPU of an architecture: see `cuflash.emulator.active`.

    Compared by identity: it is a key of cached recipes.
    """

    arch: str
    seed: int = 0
    resident: int = 0
    timeout: float = 120.0
    flags: tuple[str, ...] = ()
    family: FamilyName | None = None
    truncates: bool = False

    def __post_init__(self) -> None:
        known = [str(capability) for capability in planning.SHARED_KIB]
        named = re.fullmatch(r"sm_(\d+)[af]?", str(self.arch))
        if not named or named[1] not in known:
            raise UnsupportedError(
                f"arch is {self.arch!r}, expected one that kernels are"
                f" planned for: sm_{', sm_'.join(known)}, or one with a"
                " suffix, such as sm_90a"
            )
        runtime.check_system()

    def device(self) -> Device:
        """The properties that plans depend on."""
        return planning.device_of_arch(self.arch)

    def load(self, plan: Plan) -> tuple[Launch, ...]:
        """The plan's launches; `Machine.run` compiles their kernels."""
        return plan.launches

    def backend(self) -> Machine:
        """The `backends.base.Backend` of one call."""
        return Machine(self)

    def launch(
        self, kernel: KernelPlan, blocks: int, /, **fields: Any
    ) -> None:
        """Run one kernel.

        Parameters
        ----------
        kernel : plan.KernelPlan
            ``file`` may be an absolute path.
        blocks : int
        **fields
            The fields of its argument struct, in order. An array becomes a
            pointer to its first element; the kernel may write to it if the
            array is writable. A `BoxesOf` becomes a TensorMap, an int an int,
            a float a double; a NumPy scalar keeps its dtype.
        """
        machine = Machine(self)
        values = [machine.field(value) for value in fields.values()]
        kinds = [value.dtype for value in values]
        names = zip(fields, kinds, strict=True)
        struct = padded(64 if TensorMap in kinds else 8, *names)
        machine.run((Launch(kernel, blocks),), np.array(tuple(values), struct))


class Machine:
    """The memory of one call, and its launches: a `Backend`."""

    def __init__(self, emulator: Emulator) -> None:
        self.target = emulator
        self._placed: dict[int, memory.Placed] = {}

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype).newbyteorder("=")
        nbytes = dtype.itemsize * math.prod(np.atleast_1d(shape).tolist())
        room = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
        skip = -memory.pointer(room) % ALIGNMENT
        return room[skip : skip + nbytes].view(dtype).reshape(shape)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def rows(
        self, shape: tuple[int, ...], dtype: Any, zero: bool = False
    ) -> np.ndarray:
        return self.zeros(shape, dtype) if zero else self.empty(shape, dtype)

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        """A separate array per buffer, so that overruns are caught."""
        arrays = [self.empty(size, np.uint8) for size in nbytes]
        return arrays, self.address(arrays, written=True)

    def address(
        self, arrays: Iterable[np.ndarray | None], written: bool = False
    ) -> list[int]:
        return [self.address_of(x, written) for x in arrays]

    def address_of(
        self, array: np.ndarray | None, written: bool = False
    ) -> int:
        """The address of one array; 0 if it is None or empty."""
        if array is None or array.size == 0:
            return 0
        placed = self._placed.get(id(array))
        if placed is None:
            placed = memory.Placed(array, span=len(self._placed))
            self._placed[id(array)] = placed
        placed.written |= written
        return placed.address + placed.start

    @staticmethod
    def tensor_map(address: int, boxes: Boxes) -> bytes:
        """Encoded as engine.h's TensorMap."""
        batch, tokens, heads, columns = boxes.shape
        return np.array([
            address, columns, tokens, heads, batch,
            *boxes.strides, 64 | boxes.rows << 32, 1 | 1 << 32, *[0] * 6,
        ], np.uint64).tobytes()  # fmt: skip

    def field(self, value: Any) -> Any:
        """The representation of a value in an argument struct."""
        if isinstance(value, np.ndarray):
            return np.uint64(self.address_of(value, value.flags.writeable))
        if isinstance(value, BoxesOf):
            address = self.address_of(value.array, value.array.flags.writeable)
            boxes = Boxes.of(value.array, value.rows)
            encoded = self.tensor_map(address, boxes)
            return np.frombuffer(encoded, TensorMap)[0]
        if isinstance(value, np.generic):
            return value
        return np.int32(value) if type(value) is int else np.array(value)[()]

    def stream(self) -> int:
        return 0

    queue = stream

    def launch(
        self, loaded: tuple[Launch, ...], arguments: bytes, kind: Any
    ) -> None:
        self.run(loaded, np.ndarray((), kind, arguments))

    def run(self, launches: tuple[Launch, ...], arguments: np.ndarray) -> None:
        """Run kernels on the same memory, each in its own process."""
        emulator = self.target
        commands = [
            runtime.executable(x.kernel, emulator.arch, emulator.flags)
            for x in launches
        ]
        self._name_arrays(arguments)
        arrays = list(self._placed.values())
        with memory.shared(arrays, arguments) as (folder, lines):
            for command, launch in zip(commands, launches, strict=True):
                text = "\n".join([*self._items(launch), *lines, ""])
                (folder / "launch.txt").write_text(text, encoding="utf-8")
                kernel = launch.kernel
                runtime.run(
                    command,
                    folder,
                    kernel.entry,
                    emulator.timeout,
                    functools.partial(
                        faults.explain,
                        kernel=kernel,
                        arch=emulator.arch,
                        program=command[-1],
                        flags=emulator.flags,
                    ),
                )

    def _items(self, launch: Launch) -> list[str]:
        """The lines of launch.txt that do not describe memory."""
        kernel, emulator = launch.kernel, self.target
        flush = "-ftz=true" in nvrtc.options(kernel, emulator.arch)
        return [
            f"kernel {kernel.entry}",
            f"blocks {launch.blocks}",
            f"threads {kernel.threads}",
            f"blocks_per_sm {dict(kernel.constants).get('BLOCKS_PER_SM', 1)}",
            f"cluster {dict(kernel.constants).get('CLUSTER_BLOCKS', 1)}",
            f"shared {kernel.shared_bytes}",
            f"seed {emulator.seed}",
            f"resident {emulator.resident}",
            f"ftz {flush:d}",
            f"truncates {emulator.truncates:d}",
        ]

    def _name_arrays(self, arguments: np.ndarray) -> None:
        """Name arrays after the struct fields that hold their addresses."""
        arrays = {x.address + x.start: x for x in self._placed.values()}
        for name, address in _pointers(arguments):
            if address in arrays:
                arrays[address].name = name


def _pointers(struct: np.ndarray) -> Iterator[tuple[str, int]]:
    """(name, value) of a struct's pointers, in reverse order."""
    for name in reversed(struct.dtype.names or ()):
        if struct.dtype[name] == np.uint64:
            yield name, int(struct[name])
        elif struct.dtype[name].names:
            yield from _pointers(struct[name])
