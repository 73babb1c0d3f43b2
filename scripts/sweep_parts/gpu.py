"""The child process's work on the GPU: check and time tiles.

Only the child imports this module, which needs CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import cuflash
from bench_parts import checks, machine, timing
from bench_parts.cells import Cell
from bench_parts.runners import Inputs, make_inputs
from cuflash.backends import cupy as gpu
from cuflash.build import nvrtc
from cuflash.plans.plan import Device, main_file, plan
from cuflash.plans.tiles import Tile
from fuzz_parts import large

from . import wide
from .forcing import Forced, force
from .space import Group, check_shapes

# Bytes written before each timed call, to evict the call's data from the
# caches.
L2_TIMES = 3
# Of the first measurement, of all tiles, and of the second, of the best.
FEW, MANY = 3, 9
NEAR, MOST_FINALISTS = 1.15, 8  # times the best; this many
HOPELESS = 1.6  # times the best: left out in the group's further cells
WARM_MS, FINAL_WARM_MS = 20, 60


class Gpu:
    """The current device; `worker.serve` calls its methods."""

    def __init__(self) -> None:
        reason = machine.find_gpu()
        if reason is not None:
            raise RuntimeError(reason)
        self.flushed = cupy.empty(L2_TIMES * gpu.device(0).l2_bytes, np.uint8)

    def describe(self) -> tuple[Device, dict]:
        """Return the device as plans see it, and the record's description."""
        record = machine.describe()
        record["nvrtc"] = nvrtc.version()
        return gpu.device(0), record

    def check(self, group: Group, tile: Tile) -> dict:
        """Compare a tile's results with plain attention in float64.

        Raises
        ------
        Exception
            If one is wrong, or the kernel fails.
        """
        force(Forced(group.family, group.direction, tile))
        check = wide.check if group.is_wide else large.check
        error = max(
            max(check(shape).values()) for shape in check_shapes(group)
        )
        device = gpu.device(0)
        decided = plan(group.problem(1, 1024, 1), device, group.family, tile)
        loaded = [
            nvrtc.function(kernel, device)
            for kernel in decided.kernels
            if main_file(group.family, kernel.file)
        ]
        return {
            "error": error,
            "registers": max(x.num_regs for x in loaded),
            "local_bytes": max(x.local_size_bytes for x in loaded),
        }

    def time(
        self, cell: Cell, family: str, tiles: list[Tile], today: int,
        seconds: float,
    ) -> list[dict]:  # fmt: skip
        """Time a cell on each tile; return a dict for each, in order.

        Times all of them briefly, then the best ones and today's for longer:
        those have "ms", the others only "quick_ms".
        """
        inputs = make_inputs(cell, 0)
        forced = [Forced(family, cell.direction, tile) for tile in tiles]
        force(forced[today])
        call = _call(cell, inputs)
        checker = checks.Checker(cell, inputs)
        contenders = {i: _contender(call, x) for i, x in enumerate(forced)}
        quick = timing.alternate(
            contenders, 0, fewest=FEW, warm_ms=WARM_MS, round_ms=0,
            before=self._flush,
        )  # fmt: skip
        best = min(x.ms for x in quick.values())
        order = sorted(quick, key=lambda i: quick[i].ms)
        finalists = [i for i in order if quick[i].ms <= NEAR * best]
        finalists = finalists[:MOST_FINALISTS]
        if today not in finalists:
            finalists.append(today)
        found: list[dict[str, Any]] = [
            {
                "quick_ms": quick[i].ms,
                "hopeless": quick[i].ms > HOPELESS * best,
            }
            for i in range(len(tiles))
        ]
        for i in list(finalists):
            force(forced[i])
            checks.poison(inputs.q.nbytes)
            try:
                found[i]["error"] = checker.check(str(tiles[i]), call())
            except checks.WrongResult as error:
                found[i] |= {"fault": str(error)}
                finalists.remove(i)
        final = {}
        if finalists:
            final = timing.alternate(
                {i: contenders[i] for i in finalists}, seconds, fewest=MANY,
                warm_ms=FINAL_WARM_MS, round_ms=0, before=self._flush,
            )  # fmt: skip
        for i, timed in final.items():
            found[i] |= {
                "ms": timed.ms,
                "spread": timed.spread,
                "count": timed.count,
            }
        del inputs, call, checker, contenders
        cupy.get_default_memory_pool().free_all_blocks()
        return found

    def _flush(self) -> None:
        self.flushed.fill(0)


def _contender(call: Callable[[], Any], forced: Forced) -> timing.Contender:
    def on_tile():
        force(forced)
        return call()

    return timing.Contender([on_tile])


def _call(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
    """Return a call of a cell, on the tile that is forced when it runs."""
    q, k, v, dout = inputs
    options = {"causal": cell.causal, "precision": cell.precision}
    if cell.direction == "forward":
        return lambda: cuflash.forward(q, k, v, **options, return_lse=True)[:1]
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    return lambda: cuflash.backward(dout, q, k, v, out, lse, **options)
