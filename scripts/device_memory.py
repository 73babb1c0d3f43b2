"""Measures the device memory that a call takes, and frees cached memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the bytes that CuPy allocates for a call, results included.

    The call gets a new memory pool, because the default pool may hold free
    blocks that it would reuse.
    """
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        results = call()
        peak = pool.total_bytes()
        del results
    return peak


def free_memory() -> None:
    """Free CuPy's and PyTorch's cached memory."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
