"""Runs checked calls of `weights`, `weight_sums`, `entropy` by kernels."""

from __future__ import annotations

from typing import Any

from cuflash.backends.base import Backend
from cuflash.errors import UnsupportedError
from cuflash.request.problem import Call


def readout(call: Call, backend: Backend) -> Any:
    """Run a call of `readout.READOUTS`: its result in full rank."""
    raise _no_kernels(call)


def readout_backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a call of `readout.READOUT_GRADIENTS`: dq, dk, dlse in full rank.

    Then drow_weights, with the shape that the user passed, if wanted.
    """
    raise _no_kernels(call)


def _no_kernels(call: Call) -> UnsupportedError:
    return UnsupportedError(
        f"{call.problem.direction} has no kernels yet: pass NumPy arrays"
    )
