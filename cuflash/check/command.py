"""``python -m cuflash check``: what it does, in order."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuflash import diagnosis, folders
from cuflash.build import cache, nvrtc, warmup
from cuflash.check import (
    behaviour,
    calls,
    kernels,
    machine,
    report,
    run,
    speed,
)
from cuflash.check.calls import Call
from cuflash.check.compare import compared
from cuflash.check.expected import expected
from cuflash.check.gpu import Gpu
from cuflash.check.places import Cpu
from cuflash.check.report import NOT_CHECKED, RIGHT, WRONG, Line, Report
from cuflash.errors import CuflashError, UnsupportedError

NEEDED_BYTES = 128 << 20  # on the disk of the cache folder


class Progress:
    """One line on a terminal that is written again and again."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.shown = self.stream.isatty()
        self._last = 0.0

    def say(self, text: str) -> None:
        now = time.monotonic()
        if self.shown and now - self._last > 0.1:
            self._last = now
            print(f"\r{text[: report.WIDTH]:{report.WIDTH}}", end="",
                  file=self.stream, flush=True)  # fmt: skip

    def clear(self) -> None:
        if self.shown:
            self._last = 0.0
            print(f"\r{'':{report.WIDTH}}\r", end="", file=self.stream,
                  flush=True)  # fmt: skip


class Stopped(Exception):
    """The GPU runs no more calls."""


def check(
    device: int | None = None,
    quick: bool = False,
    as_json: bool = False,
    jobs: int | None = None,
) -> int:
    """Check a GPU, or NumPy where there is none.

    Parameters
    ----------
    device : int, optional
        The GPU; the first by default.
    quick : bool
        Fewer calls, of the first dtype of each family.
    as_json : bool
        Print JSON alone.
    jobs : int, optional
        Kernels compiled at a time; the number of CPUs by default.

    Returns
    -------
    int
        0 if all calls were right, 1 if one was wrong, 2 if the GPU could not
        be checked.
    """
    found = Report(list(machine.versions()))
    gpus = _gpus(device, found)
    if gpus:
        first = gpus[0]
        found.gpu = machine.of_gpu(first.cupy, first.index)
    if not as_json:
        _print(report.head(found))
    progress = Progress()
    try:
        if gpus:
            _check_gpus(gpus, quick, jobs, found, progress)
        elif found.status == RIGHT:
            places = calls.of_cpu(quick)
            with _timed(found, "calls"):
                check_calls(places, Cpu(), found, progress)
    except Stopped as error:
        found.faults.append(f"the rest was not checked: {error}")
        found.status = WRONG
    finally:
        progress.clear()
    wrong = any(x.wrong for x in found.lines)
    if wrong or any(x.fault for x in found.behaved):
        found.status = WRONG
    if as_json:
        print(json.dumps(report.as_json(found), indent=1))
    else:
        print()
        _print(report.table(found))
        print()
        _print(report.tail(found))
    return found.status


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


@contextmanager
def _timed(found: Report, part: str) -> Any:
    start = time.perf_counter()
    yield
    found.seconds[part] = time.perf_counter() - start


# ---- Which GPU ----


def _gpus(device: int | None, found: Report) -> list[Gpu]:
    """The GPU to check, then others; none if NumPy is to be checked.

    Notes what is wrong, and with the status that a GPU cannot be checked.
    """
    _note(found, diagnosis.two_cupys())
    try:
        cache.require_folder()
        _note(found, _full(folders.cache_folder()))
    except CuflashError as error:
        _note(found, str(error))
    has_driver = warmup.may_have_driver()
    try:
        names = warmup.gpus()
        if not names:
            raise UnsupportedError("no CUDA device")
        nvrtc.version()
        return _in_order(device, names)
    except CuflashError as error:
        reason = str(error)
    if has_driver or device is not None:
        found.status = NOT_CHECKED
        _note(found, f"the GPU cannot be used: {reason}")
    else:
        _note(found, f"no GPU is used, NumPy is checked: {reason}")
    return []


def _full(folder: Path) -> str:
    """What to do if the disk has no room for compiled kernels, or ''."""
    free = shutil.disk_usage(folder).free
    if free > NEEDED_BYTES:
        return ""
    return (
        f"only {free >> 20} MiB are free in {folder}, compiled kernels need"
        f" up to {NEEDED_BYTES >> 20} MiB: {folders.ADVICE} with free space"
    )


def _note(found: Report, note: str) -> None:
    if note:
        found.notes.append(note)


def _in_order(device: int | None, names: list[str]) -> list[Gpu]:
    """The one that was asked for, then others that are supported."""
    known = ", ".join(f"{i} ({x})" for i, x in enumerate(names))
    if device is not None and device not in range(len(names)):
        raise UnsupportedError(
            f"--device is {device}, expected one of {known}"
        )
    gpus, reasons = [], []
    for index in sorted(range(len(names)), key=lambda x: x != device):
        gpu = Gpu(index)
        try:
            gpu.device()
        except UnsupportedError as error:
            reasons.append(str(error))
            if index == device:
                break
        else:
            gpus.append(gpu)
    if not gpus:
        reasons = [*dict.fromkeys(reasons), f"GPUs here: {known}"]
        raise UnsupportedError("; ".join(reasons))
    return gpus


# ---- What is checked ----


def _check_gpus(
    gpus: list[Gpu],
    quick: bool,
    jobs: int | None,
    found: Report,
    progress: Progress,
) -> None:
    """All calls, then behaviours, then times, on the first of the GPUs."""
    gpu = gpus[0]
    device = gpu.device()
    progress.say("planning")
    with _timed(found, "planning"):
        planned = kernels.planned(calls.of_families(quick), device)
    found.missing = [f"{x} {y}" for x, y in planned.missing]
    total = len(planned.kernels)
    with _timed(found, "compiling"):
        errors = kernels.compile_all(
            planned.kernels, device, jobs or machine.num_cpus()
        )
        for i, error in enumerate(errors, 1):
            progress.say(f"compiling: {i} of {total} kernels")
            if error:
                found.faults.append(str(error))
                found.status = WRONG
    with _timed(found, "calls"):
        check_calls(planned.calls, gpu, found, progress)
    with _timed(found, "behaviour"):
        progress.say("graphs and streams")
        dtypes = tuple(dict.fromkeys(x.dtype for x in planned.calls))
        found.behaved += behaviour.repeats(planned.calls, gpu)
        found.behaved += behaviour.on_gpu(dtypes, gpus)
    with _timed(found, "times"):
        _time(planned.calls, gpu, found, progress)


def check_calls(
    to_check: list[Call], place: run.Place, found: Report, progress: Progress
) -> None:
    """Compare each call with its expected results; a line a family."""
    lines: dict[tuple[str, str], Line] = {}
    for i, call in enumerate(to_check, 1):
        progress.say(
            f"call {i} of {len(to_check)}, {len(found.faults)} wrong: {call}"
        )
        key = call.family or place.name, call.kind
        if key not in lines:
            lines[key] = Line(*key)
            found.lines.append(lines[key])
        line = lines[key]
        line.calls += 1
        try:
            worst, fault = _compare(call, place)
        except Stopped:
            line.wrong += 1
            raise
        line.worst = max(line.worst, worst)
        if fault:
            line.wrong += 1
            found.faults.append(f"{call}: {fault}")


def _compare(call: Call, place: run.Place) -> tuple[float, str]:
    """The largest error over its bound, and what is wrong, or ''."""
    wanted = expected(call)
    try:
        got = run.run(call, place)
    except Exception as error:  # whatever is broken is reported
        if isinstance(place, Gpu) and place.is_lost(error):
            raise Stopped(
                f"{call} ended the GPU's context: {error}"
            ) from error
        return float("inf"), f"{type(error).__name__}: {error}"
    results = [compared(name, x, wanted[name]) for name, x in got.items()]
    worst = max(results, key=lambda x: x.worst)
    return worst.worst, str(worst) if worst.worst > 1 else ""


def _time(
    checked: list[Call], gpu: Gpu, found: Report, progress: Progress
) -> None:
    """Time each family and dtype, as far as memory allows."""
    of_kinds: dict[tuple[str, str], Call] = {
        (x.family, x.kind): x for x in checked if x.family
    }
    timed = [x for x in found.lines if (x.family, x.kind) in of_kinds]
    for line in timed:
        progress.say(f"timing {line.family} {line.kind}")
        call = of_kinds[line.family, line.kind]
        try:
            line.speeds = speed.speeds(call, gpu)
        except Exception as error:  # whatever is broken is reported
            found.faults.append(f"timing {line.family} {line.kind}: {error}")
            if not isinstance(error, MemoryError):
                found.status = WRONG
