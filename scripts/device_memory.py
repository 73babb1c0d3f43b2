"""How much device memory a call takes; used by demo and benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that CuPy has to get for a call, results included.

    A pool of its own serves the call: in the default one it might find room
    that others have left.
    """
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        results = call()
        peak = pool.total_bytes()
        del results
    return peak
