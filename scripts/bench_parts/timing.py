"""Times calls with CUDA events on the null stream, which all runners use."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import cupy

WARM_MS = 100  # before the first time counts: clocks rise, caches fill
ROUND_MS = 10  # of one runner, before the next one runs
FEWEST = 7  # times for a median


class Timing(NamedTuple):
    """Median milliseconds, and the interquartile range relative to it."""

    ms: float
    spread: float
    count: int


class Contender(NamedTuple):
    """A runner's calls on one cell, one per set of inputs."""

    calls: list[Callable[[], Any]]
    context: Callable[[], Any] = contextlib.nullcontext
    wait: Callable[[], Any] | None = None


def elapsed_ms(call: Callable[[], Any], repeats: int = 1) -> float:
    """Return the approximate time of a call, for planning."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / repeats


def alternate(
    contenders: dict[Hashable, Contender],
    seconds: float,
    *,
    fewest: int = FEWEST,
    warm_ms: float = WARM_MS,
    round_ms: float = ROUND_MS,
    before: Callable[[], Any] = lambda: None,
) -> dict[Hashable, Timing]:
    """Time contenders alternately, so that clock drift affects all equally.

    All calls are queued without waiting: as long as the host stays ahead of
    the GPU, the time between two events contains no host work. Contenders
    with a `wait` are the exception: each of their rounds is timed by the
    host's clock, from an idle GPU to an idle GPU, and counts as one time.

    Parameters
    ----------
    contenders : dict
        By name.
    seconds : float
        Time to measure each.
    fewest : int
        Least number of calls of each, however long they take.
    warm_ms, round_ms : float
        Warm-up of all before the first measurement; a contender's round,
        before the next one's.
    before : callable
        Called before each timed call, untimed.
    """
    sizes = {}
    for name, contender in contenders.items():
        with contender.context():
            contender.calls[0]()
            if contender.wait:
                once = _clocked_ms(contender, 2)
            else:
                once = elapsed_ms(contender.calls[0], 2)
            once = max(once, 1e-3)
        count = max(fewest, math.ceil(seconds * 1e3 / once))
        share = warm_ms / len(contenders)
        sizes[name] = count, max(1, round(round_ms / once)), share / once
    rounds = max(math.ceil(c / size) for c, size, _ in sizes.values())

    for name, contender in contenders.items():
        with contender.context():
            for i in range(math.ceil(sizes[name][2])):
                contender.calls[i % len(contender.calls)]()
    events = {name: [] for name in contenders}
    clocked = {name: [] for name, x in contenders.items() if x.wait}
    for _ in range(rounds):
        for name, contender in contenders.items():
            with contender.context():
                if contender.wait:
                    clocked[name].append(
                        _clocked_ms(contender, sizes[name][1])
                    )
                    continue
                for _ in range(sizes[name][1]):
                    before()
                    _timed_call(contender.calls, events[name])
    cupy.cuda.get_current_stream().synchronize()
    return {
        name: _summary(
            clocked.get(name)
            or [cupy.cuda.get_elapsed_time(*pair) for pair in events[name]]
        )
        for name in contenders
    }


def _clocked_ms(contender: Contender, repeats: int) -> float:
    """Return the mean time of a call by the host's clock."""
    cupy.cuda.get_current_stream().synchronize()
    contender.wait()
    start = time.perf_counter()
    for i in range(repeats):
        contender.calls[i % len(contender.calls)]()
    contender.wait()
    return (time.perf_counter() - start) * 1e3 / repeats


def _timed_call(calls: list, pairs: list) -> None:
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    call = calls[len(pairs) % len(calls)]
    start.record()
    call()
    stop.record()
    pairs.append((start, stop))


def _summary(times: list[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, (high - low) / median, len(times))


def ceilings(dtype: str, seconds: float) -> dict[str, float]:
    """Measure this GPU's ceilings: a matmul and a copy.

    The matmul is in float16 for both 16-bit dtypes.
    """
    n = 8192
    if dtype not in ("float32", "float64"):
        dtype = "float16"
    random = cupy.random.default_rng(0)
    a, b = (
        random.standard_normal((n, n), cupy.float32).astype(dtype)
        for _ in range(2)
    )
    source = random.standard_normal(1 << 28, cupy.float32)  # 1 GiB
    target = cupy.empty_like(source)

    def copy():
        target.data.copy_from_device_async(source.data, source.nbytes)

    contenders = {
        "matmul": Contender([lambda: cupy.matmul(a, b)]),
        "copy": Contender([copy]),
    }
    times = alternate(contenders, seconds)
    return {
        f"matmul_{dtype}_{n}_tflops": 2 * n**3 / times["matmul"].ms / 1e9,
        "copy_gb_s": 2 * source.nbytes / times["copy"].ms / 1e6,
    }
