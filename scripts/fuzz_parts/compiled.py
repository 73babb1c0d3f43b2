"""Compiles the kernels of coming shapes while earlier ones are checked."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from cuflash.backends import cupy as gpu
from cuflash.build import nvrtc
from cuflash.plan import KernelPlan, plan, wanted_family

from .shapes import Shape

AHEAD = 50  # shapes


@contextlib.contextmanager
def compiled_ahead(shapes: Iterable[Shape]) -> Iterator[Iterator[Shape]]:
    """Yield the shapes in order, each with its kernels compiled and cached.

    NVRTC takes seconds per kernel, and most shapes need one or two new ones.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            yield _in_order(shapes, pool)
        finally:
            # Wait for running compilations: see docs/internals/host.md.
            pool.shutdown(cancel_futures=True)


def _in_order(
    shapes: Iterable[Shape], pool: ThreadPoolExecutor
) -> Iterator[Shape]:
    device = gpu.device(0)
    compiling: dict[KernelPlan, Future] = {}
    waiting: deque[Shape] = deque()

    def first() -> Shape:
        shape = waiting.popleft()
        for kernel in _kernels(shape):
            compiling[kernel].result()  # raises the compilation's exception
        return shape

    for shape in shapes:
        for kernel in _kernels(shape):
            if kernel not in compiling:
                compiling[kernel] = pool.submit(
                    nvrtc.cubin_file, kernel, device.arch
                )
        waiting.append(shape)
        if len(waiting) > AHEAD:
            yield first()
    while waiting:
        yield first()


def _kernels(shape: Shape) -> list[KernelPlan]:
    return [
        kernel
        for direction in ("forward", "backward")
        for kernel in plan(
            shape.problem(direction), gpu.device(0), wanted_family()
        ).kernels
    ]
