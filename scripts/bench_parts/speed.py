"""One cell: make inputs, check, time."""

from __future__ import annotations

import math

import cupy

from cuflash.backends import cupy as gpu
from cuflash.plans.plan import Plan, plan, wanted_family
from device_memory import free_memory

from . import checks
from .cells import Cell
from .compiling import problem_of
from .report import first_line
from .runners import DTYPES, OURS, Inputs, Runner, make_inputs
from .timing import Contender, alternate

MOST_SETS = 16


def measure(cell: Cell, runners: list[Runner], seconds: float) -> dict:
    """Return a row of figures.

    A runner that cannot run the cell is left out with a message. A wrong
    result of cuflash is a fault; a peer's only a message. TFLOP/s refer to
    the cell that a runner runs, which may be another one.
    """
    row = {
        **cell.row,
        "tflops": {},
        "ms": {},
        "spread": {},
        "count": {},
        "error": {},
        "faults": [],
        "left_out": [],
        "plan": str(_plan(cell)),
        **cell.row_of_tiles(lambda x: _plan(x).tile),
    }
    contenders = {}
    ran = {runner.name: runner.variant(cell) for runner in runners}
    made = {}  # input sets, and what checks their results, by cell
    for runner in runners:
        own = ran[runner.name]
        if own not in made:
            sets = _input_sets(own)
            made[own] = sets, checks.Checker(own, sets[0])
        sets, checker = made[own]
        try:
            contenders[runner.name] = _prepare(own, sets, runner)
            row["error"][runner.name] = _check(
                contenders[runner.name], checker, runner
            )
        except Exception as error:  # any error of a peer
            known = checks.WrongResult, RuntimeError, MemoryError
            if runner is OURS and not isinstance(error, known):
                raise
            contenders.pop(runner.name, None)
            ours = runner.prepare is OURS.prepare
            kind = "faults" if ours else "left_out"
            row[kind].append(f"{runner.name}: {first_line(error)}")
    timings = alternate(contenders, seconds) if contenders else {}
    for name, timing in timings.items():
        row["ms"][name] = timing.ms
        row["tflops"][name] = ran[name].tflops(timing.ms)
        row["spread"][name] = timing.spread
        row["count"][name] = timing.count
    contenders.clear()
    made.clear()
    del sets, checker
    free_memory()
    return row


def _input_sets(cell: Cell) -> list[Inputs]:
    """Return enough input sets to exceed L2, so that calls read DRAM."""
    first = make_inputs(cell, 0)
    nbytes = sum(x.nbytes for x in first)
    l2 = cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]
    count = 1 if nbytes > 2 * l2 else 1 + math.ceil(2 * l2 / nbytes)
    count = min(count, MOST_SETS)
    return [first, *(make_inputs(cell, seed) for seed in range(1, count))]


def _prepare(cell: Cell, sets: list[Inputs], runner: Runner) -> Contender:
    with runner.context():
        calls = [runner.prepare(cell, inputs) for inputs in sets]
    return Contender(calls, runner.context, runner.wait)


def _check(
    contender: Contender, checker: checks.Checker, runner: Runner
) -> float:
    with contender.context():
        checks.poison(_result_bytes(checker.cell))
        results = contender.calls[0]()
        if contender.wait:
            contender.wait()
        kind = runner.kind(checker.cell)
        return checker.check(runner.name, results, kind)


def _result_bytes(cell: Cell) -> int:
    return math.prod(cell.shape) * DTYPES[cell.dtype].itemsize


def _plan(cell: Cell) -> Plan:
    problem = problem_of(cell, cell.direction)
    return plan(problem, gpu.device(0), wanted_family())
