"""Compiles cuflash's kernels in parallel before the first is needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cuflash.build import nvrtc
from cuflash.errors import CompileError
from cuflash.plans.plan import Device, KernelPlan, plan, wanted_family
from cuflash.request.problem import Problem

from .cells import Cell


def problem_of(cell: Cell, direction: str) -> Problem:
    """Return the problem of a cell's call, as cuflash makes it."""
    batch, seqlen, heads, d = cell.shape
    return Problem(
        direction, cell.dtype, batch, seqlen, seqlen, heads,
        heads // cell.group_size, d, d, d**-0.5, cell.causal,
        precision=cell.precision, **cell.problem_fields,
    )  # fmt: skip


def kernels_of(cells: Iterable[Cell], device: Device) -> list[KernelPlan]:
    """Return the kernels of the calls; backward needs forward's results."""
    found = {}
    for cell in cells:
        for direction in dict.fromkeys(("forward", cell.direction)):
            problem = problem_of(cell, direction)
            decided = plan(problem, device, wanted_family())
            found |= dict.fromkeys(decided.kernels)
    return list(found)


def compile_all(cells: Iterable[Cell], device: Device) -> None:
    """Compile them to the cache folder: NVRTC takes seconds for each.

    A kernel that does not compile raises in the call that needs it.
    """

    def compiled(kernel: KernelPlan) -> None:
        with contextlib.suppress(CompileError):
            nvrtc.cubin_file(kernel, device.arch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, kernels_of(cells, device)))
