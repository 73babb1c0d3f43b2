"""What a check has found: as text for people and bug reports, and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from cuflash.check.behaviour import Behaved
from cuflash.check.speed import Speed

WIDTH = 79
_NAMES = 15  # columns of a fact's name
_MOST_FAULTS = 10  # that the text shows

RIGHT, WRONG, NOT_CHECKED = 0, 1, 2  # the exit status


@dataclass
class Line:
    """What was found of one family and dtype.

    Attributes
    ----------
    family, kind : str
        kind: the dtype, or "tf32x3".
    calls, wrong : int
    worst : float
        The largest error as a fraction of its bound.
    speeds : list of Speed
    """

    family: str
    kind: str
    calls: int = 0
    wrong: int = 0
    worst: float = 0.0
    speeds: list[Speed] = field(default_factory=list)


@dataclass
class Report:
    """All that a check has found.

    Attributes
    ----------
    versions : list of (str, str)
    gpu : dict or None
        What tells the GPU from others; None: NumPy was checked.
    notes : list of str
        What is unusual about the installation, and what to do.
    lines : list of Line
    missing : list of str
        Families that the GPU does not run.
    faults : list of str
        Calls with wrong results, kernels that do not compile.
    behaved : list of Behaved
    seconds : dict of float
        By part of the check.
    status : int
    """

    versions: list[tuple[str, str]]
    gpu: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    behaved: list[Behaved] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    status: int = RIGHT


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON's types."""
    found = asdict(report)
    found["versions"] = dict(report.versions)
    found["behaved"] = [
        {"name": x.name, "call": str(x.call), "fault": x.fault}
        for x in report.behaved
    ]
    for line in found["lines"]:
        if not math.isfinite(line["worst"]):
            line["worst"] = None  # NaN or infinite where it must not be
    return found


def head(report: Report) -> Iterator[str]:
    """What runs: versions, GPU, notes."""
    for name, text in report.versions:
        yield from _fact(name, text)
    gpu = report.gpu
    if gpu:
        yield from _fact(
            "GPU", f"{gpu['name']}, compute capability {gpu['capability']},"
            f" {gpu['num_sms']} SMs, {gpu['memory_gib']} GiB",
        )  # fmt: skip
        yield from _fact(
            "driver", f"{gpu['driver']} for CUDA {gpu['driver_cuda']};"
            f" CuPy's CUDA is {gpu['runtime_cuda']}".lstrip(),
        )  # fmt: skip
    for note in report.notes:
        yield from _fact("note", note)


def _fact(name: str, text: str) -> Iterator[str]:
    width = WIDTH - _NAMES
    lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    yield f"{name:{_NAMES}}{lines[0]}"
    for line in lines[1:]:
        yield f"{'':{_NAMES}}{line}"


_HEADS = ("family", "dtype", "calls", "worst", "direction", "ms", "TFLOP/s")


def table(report: Report) -> Iterator[str]:
    """A line a family and dtype, with its speeds."""
    timed = any(line.speeds for line in report.lines)
    line_of = "{:13}{:9}{:>6}{:>7}  ".format
    heads = line_of(*_HEADS[:4])
    if timed:
        heads += "{:9}{:>8}{:>9}  {}".format(*_HEADS[4:], "expected")
    yield heads.rstrip()
    for x in report.lines:
        start = line_of(x.family, x.kind, x.calls, _percent(x))
        if not x.speeds:
            yield start.rstrip()
        for speed in x.speeds:
            yield (start + _speed(speed)).rstrip()
            start = " " * len(start)


def _percent(line: Line) -> str:
    if line.wrong:
        return "WRONG"
    return f"{100 * line.worst:.0f} %"


def _speed(x: Speed) -> str:
    text = f"{x.direction:9}{1e3 * x.seconds:8.2f}{x.rate:9.1f}  "
    if x.expected:
        text += f"{x.expected:.0f} on {x.expected_of.removeprefix('NVIDIA ')}"
    elif x.unit != "TFLOP/s":
        most = f" of {x.limit:.0f}" if x.limit else ""
        text += f"{x.unit}{most}"
    elif x.limit:
        text += f"below {x.limit:.0f}"
    return text


def tail(report: Report) -> Iterator[str]:
    """Behaviours, faults, and one line that sums up."""
    names = dict.fromkeys(x.name for x in report.behaved)
    for name in names:
        all_of = [x for x in report.behaved if x.name == name]
        bad = [x for x in all_of if x.fault]
        said = f"{len(bad)} of {len(all_of)} WRONG" if bad else "right"
        yield f"{name:{_NAMES + 7}}{len(all_of):3} calls, {said}"
        for x in bad[:3]:
            yield from _wrapped(f"{x.call}: {x.fault}")
    if report.missing:
        yield from _wrapped(f"not on this GPU: {', '.join(report.missing)}", 0)
    for fault in report.faults[:_MOST_FAULTS]:
        yield from _wrapped(fault)
    more = len(report.faults) - _MOST_FAULTS
    if more > 0:
        yield f"  and {more} more: --json lists all"
    parts = [f"{x} {y:.0f} s" for x, y in report.seconds.items()]
    yield from _wrapped(f"time: {', '.join(parts)}" if parts else "", 0)
    yield _sum(report)


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent="    ",
        break_on_hyphens=False,
    )  # fmt: skip


def _sum(report: Report) -> str:
    count = sum(x.calls for x in report.lines) + len(report.behaved)
    wrong = sum(x.wrong for x in report.lines)
    wrong += sum(bool(x.fault) for x in report.behaved)
    if report.status == NOT_CHECKED and not count:
        return "NOT CHECKED: the note above says why"
    if wrong:
        return f"{wrong} of {count} calls WRONG"
    if report.status == WRONG:
        return f"{count} calls right, {len(report.faults)} FAULTS besides"
    return f"all {count} calls right"
