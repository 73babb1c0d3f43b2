"""One decode call: make inputs, check, capture, time by each protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy

from device_memory import free_memory

from . import checks, decode_checks
from .decode import FEWEST, FLUSH_BYTES, WARM_CALLS, DecodeCell
from .decode_runners import OURS, READING, Captured, DecodeRunner
from .report import first_line
from .runners import Inputs, make_inputs
from .timing import Contender, Timing, alternate, elapsed_ms


class Ready(NamedTuple):
    """A runner's checked calls: a graph of many, a graph of one, and plain."""

    warm: Captured
    flushed: Captured
    call: Callable[[], tuple]
    context: Callable[[], Any]


def measure(
    cell: DecodeCell, runners: list[DecodeRunner], seconds: float
) -> dict:
    """Return a row of figures.

    A runner that cannot run the cell is left out with a message. A wrong
    result of ours is a fault; a peer's only a message.
    """
    row = {
        **cell.row,
        "us": {},
        "spread": {},
        "count": {},
        "error": {},
        "faults": [],
        "left_out": [],
        "plan": _plan(cell),
    }
    inputs = make_inputs(cell, 0)
    checkers: dict[Callable, Callable] = {}
    ready: dict[str, Ready] = {}
    for runner in runners:
        try:
            if runner.checker not in checkers:
                checkers[runner.checker] = runner.checker(cell, inputs)
            check = checkers[runner.checker]
            ready[runner.name], error = _prepare(cell, inputs, runner, check)
            row["error"][runner.name] = error
        except Exception as error:  # any error of a peer
            known = checks.WrongResult, RuntimeError, MemoryError
            ours = runner in (OURS, READING)
            if ours and not isinstance(error, known):
                raise
            kind = "faults" if ours else "left_out"
            row[kind].append(f"{runner.name}: {first_line(error)}")
    for protocol, timings in _timings(ready, seconds).items():
        calls = WARM_CALLS if protocol == "warm" else 1
        for name, timing in timings.items():
            figures = timing.ms * 1e3 / calls, timing.spread, timing.count
            for key, value in zip(
                ("us", "spread", "count"), figures, strict=True
            ):
                row[key].setdefault(name, {})[protocol] = value
    ready.clear()
    checkers.clear()
    del inputs
    free_memory()
    return row


def _prepare(
    cell: DecodeCell, inputs: Inputs, runner: DecodeRunner, check: Callable
) -> tuple[Ready, float]:
    """Return the calls of a runner, and the largest error / bound."""
    with runner.context():
        call = runner.prepare(cell, inputs)
        checks.poison(math.prod(cell.shape) * inputs.q.itemsize)
        errors = [check(runner.name, call())]
        graphs = []
        for count in (WARM_CALLS, 1):
            graphs.append(runner.capture(call, count))
            decode_checks.poison(graphs[-1].results)
            graphs[-1].launch()
            errors.append(check(runner.name, graphs[-1].results))
    return Ready(*graphs, call, runner.context), max(errors)


def _timings(
    ready: dict[str, Ready], seconds: float
) -> dict[str, dict[str, Timing]]:
    """Return the timings of all, by protocol."""
    if not ready:
        return {}
    l2 = cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]
    buffer = cupy.empty(max(FLUSH_BYTES, 2 * l2), cupy.uint8)

    def flush() -> None:
        buffer.fill(0)

    plain = {name: Contender([x.call], x.context) for name, x in ready.items()}
    warm, flushed = (
        {
            name: Contender([getattr(x, protocol).launch])
            for name, x in ready.items()
        }
        for protocol in ("warm", "flushed")
    )
    return {
        "warm": _in_turns(warm, seconds, lambda: None),
        "flushed": _in_turns(flushed, seconds, flush),
        "call": _in_turns(plain, seconds, flush),
    }


def _in_turns(
    contenders: dict[str, Contender],
    seconds: float,
    before: Callable[[], None],
) -> dict[str, Timing]:
    """Time one launch of each in turn, as often as the fastest has time."""
    times = []
    for contender in contenders.values():

        def once(launch=contender.calls[0]):
            before()
            launch()

        with contender.context():
            once()
            times.append(elapsed_ms(once, 2))
    turns = math.ceil(seconds * 1e3 / max(min(times), 1e-3))
    return alternate(
        contenders, 0, fewest=max(FEWEST, turns), round_ms=0, before=before
    )


def _plan(cell: DecodeCell) -> str:
    from cuflash.backends import cupy as gpu
    from cuflash.plans.plan import plan, wanted_family

    return str(plan(cell.problem, gpu.device(0), wanted_family()))
