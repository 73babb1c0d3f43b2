"""Where calls run without a GPU: by NumPy, or by kernels on the emulator."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuflash.backends import emulator
from cuflash.check.calls import Call


class Cpu:
    """Calls on NumPy arrays."""

    name = "NumPy"

    def put(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def get(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def by(self, call: Call) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def poison(self) -> None:
        """Nothing to do: NumPy's memory is not pooled."""


class Emulated(Cpu):
    """The kernels of an architecture, on this CPU; their memory is NaN."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def by(self, call: Call) -> AbstractContextManager[Any]:
        return emulator.active(self.arch, family=call.family)
