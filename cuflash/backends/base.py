"""What runs calls: a `Backend`, where kernels do, and a `Runner`.

`execute` knows arrays and devices by a `Backend` alone. A bridge to another
array library brings one with that library's allocator and stream, and the
`Target` of the device: no other array library is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cuflash.layouts import Boxes
from cuflash.plan import Device, Family, Plan
from cuflash.problem import Call


class Target(Protocol):
    """A device. What is decided about calls is remembered by it."""

    @property
    def family(self) -> Family | None:
        """The kernel family that is asked for."""

    def device(self) -> Device:
        """The device as plans see it."""

    def load(self, decided: Plan) -> Any:
        """A plan's kernels, as `Backend.launch` takes them."""

    def __hash__(self) -> int: ...


class Backend(Protocol):
    """An array library on a device: its arrays, allocator and stream.

    Of arrays themselves `execute` asks for ``shape``, ``ndim``, ``reshape``
    and basic indexing.
    """

    @property
    def target(self) -> Target:
        """The device."""

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the device is the current one."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array in C order and native bytes, aligned as CUDA does."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The same, filled with 0."""

    def copy(self, target: Any, source: Any) -> None:
        """Write an array's elements, converted, to one of its shape."""

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        """New memory for kernels alone, of so many bytes each.

        Returns
        -------
        kept
            What the memory lives as long as.
        addresses : list of int
            Where each begins; 0 of those without a byte.
        """

    def address(
        self, arrays: Iterable[Any], written: bool = False
    ) -> list[int]:
        """The addresses of first elements; whether kernels write to them.

        0 of None. All arrays of a kind at once: a call has twenty.
        """

    @staticmethod
    def tensor_map(address: int, boxes: Boxes) -> bytes:
        """A TensorMap of the array there that the boxes were made for."""

    def stream(self) -> int:
        """The stream on which launches are queued, as CUDA's handle."""

    def launch(self, loaded: Any, arguments: bytes, kind: Any) -> None:
        """Queue loaded kernels, in order, with one argument struct.

        `kind` is the struct's dtype.
        """


class Runner(Protocol):
    """What computes checked calls: `execute.Kernels`, or backends/numpy.py.

    Results are in full rank.
    """

    def forward(self, call: Call) -> tuple[Any, Any]:
        """Out and lse; None for an lse that is not wanted is allowed."""

    def backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dv; dbias and dsink if wanted."""

    def merge_states(self, call: Call) -> tuple[Any, Any]:
        """Out and lse."""
