"""Protocols: `Target`, `Backend` and `Runner`.

`launch` accesses arrays and devices only through a `Backend`. A bridge to
another array library provides one that uses the library's allocator and
stream, and the device's `Target`; it needs no second array library.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cuflash.plans.plan import Device, FamilyName, Plan
from cuflash.request.layouts import Boxes
from cuflash.request.problem import Call


class Target(Protocol):
    """A device; part of the key under which recipes are cached."""

    @property
    def family(self) -> FamilyName | None:
        """The requested kernel family, or None."""

    def device(self) -> Device:
        """The properties that plans depend on."""

    def load(self, plan: Plan) -> Any:
        """A plan's kernels, in the form that `Backend.launch` expects."""

    def __hash__(self) -> int: ...


class Backend(Protocol):
    """An array library on a device: its arrays, allocator and stream.

    `launch` uses ``shape``, ``ndim``, ``dtype``, ``reshape`` and basic
    indexing of its arrays.
    """

    @property
    def target(self) -> Target:
        """The device."""

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the device is current."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new C-contiguous array, native bytes, aligned like CUDA's."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The same, filled with 0."""

    def rows(
        self, shape: tuple[int, ...], dtype: Any, zero: bool = False
    ) -> Any:
        """The memory of `empty`, or of `zeros`, for rows of q, out and so on.

        A view of it with axes in the order of the call's arrays: that of
        (batch, seqlen, heads, head_dim) may be another.
        """

    def copy(self, target: Any, source: Any) -> None:
        """Copy `source` to `target`, of the same shape, converting dtypes."""

    def workspace(self, nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        """Allocate workspace buffers of the given sizes.

        Returns
        -------
        kept
            The object that keeps the memory alive.
        addresses : list of int
            The address of each buffer; 0 for an empty one.
        """

    def address(
        self, arrays: Iterable[Any], written: bool = False
    ) -> list[int]:
        """The addresses of the arrays' first elements; 0 for None.

        `written` tells whether kernels write to the arrays. Takes a list
        because a call has up to twenty arrays.
        """

    @staticmethod
    def tensor_map(address: int, boxes: Boxes) -> bytes:
        """The TensorMap of the array at `address` that `boxes` describe."""

    def stream(self) -> int:
        """The CUDA handle of the stream that launches are queued on."""

    def queue(self) -> Hashable | None:
        """What identifies the stream, whose launches run in order.

        None if a later call on it may not find what this one's write: while
        it is captured.
        """

    def launch(self, loaded: Any, arguments: bytes, kind: Any) -> None:
        """Queue loaded kernels, in order, with one argument struct.

        `kind` is the struct's dtype.
        """


class Runner(Protocol):
    """Runs checked calls: `launch.runner.Kernels`, or `launch.host.Host`.

    Results are in full rank.
    """

    def forward(self, call: Call) -> tuple[Any, ...]:
        """Out, lse and, if requested, max_score.

        lse may be None if it is not requested.
        """

    def backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dv; the gradients of options if requested."""

    def merge_states(self, call: Call) -> tuple[Any, Any]:
        """Out and lse."""

    def apply_rotary(self, call: Call) -> Any:
        """Out."""

    def forward_kvcache(self, call: Call) -> tuple[Any, Any]:
        """Out and lse; lse may be None if it is not requested."""

    def jvp(self, call: Call) -> tuple[Any, ...]:
        """Out, lse, out_dot and lse_dot, the last two by direction.

        lse and lse_dot may be None if they are not requested.
        """

    def finish(self) -> None:
        """End a call: let the owners of its arrays go on."""

    def double_backward(self, call: Call) -> tuple[Any, ...]:
        """d2q, d2k, d2v, ddout; those of options, ddlse if requested."""

    def readout(self, call: Call) -> Any:
        """Weights, their sums or entropies."""

    def readout_backward(self, call: Call) -> tuple[Any, ...]:
        """dq, dk, dlse; drow_weights, as the user passed it, if requested."""
