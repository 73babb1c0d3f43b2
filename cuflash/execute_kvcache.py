"""Runs checked `forward_kvcache` calls by kernels."""

from __future__ import annotations

from typing import Any

from cuflash.backends.base import Backend
from cuflash.errors import UnsupportedError
from cuflash.problem import Call


def forward_kvcache(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a forward_kvcache call: out in full rank and, if wanted, lse."""
    raise UnsupportedError(
        "forward_kvcache got arrays on a CUDA device, expected NumPy arrays:"
        " this version has no kernels for it"
    )
