"""NCCL's calls, from CuPy's bindings or from nccl4py's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from cuflash.api import arrays as api_arrays
from cuflash.errors import UnsupportedError, ValueRangeError

from .group import Message

NAMES = ("cupy", "nccl4py")


class Library(Protocol):
    """Bindings of NCCL."""

    def unique_id(self) -> bytes:
        """A new id, which all ranks of a communicator are given."""

    def join(self, size: int, unique_id: bytes, rank: int) -> Any:
        """A communicator of the current device; waits for the other ranks."""

    def exchange(
        self,
        communicator: Any,
        sends: Sequence[Message],
        receives: Sequence[Message],
        stream: int,
    ) -> None:
        """Queue sends and receives, as one group, on a stream."""


class OfCupy:
    """`cupy.cuda.nccl`."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("cupy.cuda.nccl found no NCCL")
        self._nccl = nccl

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, size: int, unique_id: bytes, rank: int) -> Any:
        return self._nccl.NcclCommunicator(size, unique_id, rank)

    def exchange(
        self,
        communicator: Any,
        sends: Sequence[Message],
        receives: Sequence[Message],
        stream: int,
    ) -> None:
        self._nccl.groupStart()
        try:
            for call, messages in (
                (communicator.send, sends), (communicator.recv, receives)
            ):  # fmt: skip
                for array, rank in messages:
                    count, dtype = self._elements(array)
                    call(array.data.ptr, count, dtype, rank, stream)
        finally:
            self._nccl.groupEnd()

    def _elements(self, array: Any) -> tuple[int, int]:
        """How many elements, and NCCL's type of them."""
        name = {
            "float16": "NCCL_FLOAT16",
            "bfloat16": "NCCL_BFLOAT16",
            "float32": "NCCL_FLOAT32",
            "float64": "NCCL_FLOAT64",
        }.get(array.dtype.name)
        if name is None:
            return array.nbytes, self._nccl.NCCL_UINT8
        return array.size, getattr(self._nccl, name)


class OfNccl4py:
    """The package nccl4py."""

    def __init__(self) -> None:
        import nccl.core

        self._nccl = nccl.core

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, size: int, unique_id: bytes, rank: int) -> Any:
        own = self._nccl.UniqueId.from_bytes(unique_id)
        return self._nccl.Communicator.init(size, rank, own)

    def exchange(
        self,
        communicator: Any,
        sends: Sequence[Message],
        receives: Sequence[Message],
        stream: int,
    ) -> None:
        with self._group():
            for array, rank in sends:
                communicator.send(_bytes(array), rank, stream=stream)
            for array, rank in receives:
                communicator.recv(_bytes(array), rank, stream=stream)

    def _group(self) -> AbstractContextManager[Any]:
        @contextmanager
        def group() -> Any:
            self._nccl.group_start()
            try:
                yield
            finally:
                self._nccl.group_end()

        return group()


def _bytes(array: Any) -> Any:
    """A contiguous array as bytes: no protocol knows bfloat16."""
    return array.reshape(-1).view(np.uint8)


def library(name: str | None = None) -> Library:
    """Bindings by name; by default CuPy's, else nccl4py's.

    Raises
    ------
    UnsupportedError
        If none can be imported, or finds NCCL.
    """
    if name is not None and name not in NAMES:
        raise ValueRangeError(
            f"library is {name!r}, expected one of {', '.join(NAMES)}"
        )
    api_arrays.on_cuda()  # raises if CuPy is missing
    reasons = []
    for each, kind in (("cupy", OfCupy), ("nccl4py", OfNccl4py)):
        if name in (None, each):
            try:
                return kind()
            except ImportError as error:
                reasons.append(f"{each}: {error}")
    advice = (
        'pip install "cuflash[nccl13]", or "cuflash[nccl12]" for a CUDA 12 '
        "driver"
    )
    if sys.platform == "win32":
        advice = "Windows has none: use WSL 2, or one GPU"
    raise UnsupportedError(
        f"NCCL was not found ({'; '.join(reasons)}): {advice}"
    )
