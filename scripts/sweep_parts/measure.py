"""A sweep on the GPU: compile, check and time group by group."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from bench_parts.cells import Cell
from bench_parts.report import say
from cuflash.build import nvrtc
from cuflash.errors import CompileError
from cuflash.plans.plan import Device, KernelPlan

from .compiling import Compiler
from .meter import Meter
from .record import Record
from .space import (
    Choice,
    Group,
    as_json,
    choices,
    companions,
    planned,
    words,
)
from .worker import TileFault, Worker

# Seconds after which a cell's call is considered to hang.
CHECK_SECONDS, TIME_SECONDS = 15.0, 120.0
# Shares of a group's budget at which compiling and checking end.
COMPILED_BY, CHECKED_BY = 0.5, 0.75


class Sweep:
    """Measures groups and keeps what it measured in a record."""

    def __init__(
        self, worker: Worker, record: Record, device: Device, options: Any
    ) -> None:
        self.worker, self.record = worker, record
        self.device, self.options = device, options
        self.left_out: list[str] = []

    def run(self, groups: list[Group], until: float) -> None:
        """Measure all that is not in the record yet, until the time is up.

        When a group starts, it gets an equal share of the remaining time; the
        tiles nearest to today's come first.
        """
        o = self.options
        with Compiler(self._compiled, o.jobs) as pool:
            todo = []
            for group in groups:
                cells = o.cells(group)
                swept = o.chosen(choices(group, self.device))
                new = [
                    cell
                    for cell in cells
                    if not self.record.has(group, cell, swept)
                ]
                if new:
                    todo.append((group, new, swept))
            known = sum(len(o.cells(group)) for group in groups)
            known -= sum(len(cells) for _, cells, _ in todo)
            if known:
                say(f"{known} cells are in {self.record.path} already")
            total = sum(len(cells) for _, cells, _ in todo)
            with Meter(total, "cells") as meter:
                for i, (group, cells, swept) in enumerate(todo):
                    now = time.monotonic()
                    share = (until - now) / (len(todo) - i)
                    for follower in todo[i : i + 2]:  # compile ahead
                        pool.submit(self._tasks(*follower))
                    meter.step(0, str(group))
                    self._group(pool, group, cells, swept, now, share, meter)
                    self.record.save()

    def _compiled(self, kernel: KernelPlan) -> None:
        nvrtc.cubin_file(kernel, self.device.arch)

    def _tasks(
        self, group: Group, cells: list[Cell], swept: list[Choice]
    ) -> list[KernelPlan]:
        kernels = companions(group, self.device, cells)
        for choice in swept:
            if choice.digest not in self.record.checked:
                kernels += choice.kernels
        return list(dict.fromkeys(kernels))

    def _group(
        self, pool: Compiler, group: Group, cells: list[Cell],
        swept: list[Choice], start: float, share: float, meter: Meter,
    ) -> None:  # fmt: skip
        tasks = self._tasks(group, cells, swept)
        made = dict(pool.results(tasks, start + COMPILED_BY * share))
        good = []
        for i, choice in enumerate(swept):
            if choice.digest not in self.record.checked:
                if not all(k in made for k in choice.kernels):
                    continue  # no time to compile it
                if time.monotonic() >= start + CHECKED_BY * share:
                    continue
                meter.step(0, f"{group}: check {i + 1} of {len(swept)}")
                self.record.checked[choice.digest] = self._check(
                    group, choice, made
                )
            if "fault" not in self.record.checked[choice.digest]:
                good.append(choice)
        missing = sum(x.digest not in self.record.checked for x in swept)
        if missing:
            self.left_out.append(
                f"{group}: {missing} of {len(swept)} tiles, for want of time"
            )
        hopeless: set[str] = set()
        for cell in cells:
            if time.monotonic() >= start + share:
                self.left_out.append(f"{cell}, for want of time")
            elif good:
                meter.step(0, f"{group} seqlen {cell.seqlen:,}")
                self._time(group, cell, good, hopeless)
                self.record.save()
            meter.step()

    def _check(self, group: Group, choice: Choice, made: dict) -> dict:
        for kernel in choice.kernels:
            if isinstance(made[kernel], CompileError):
                return self._fault(group, choice, "does not compile")
        try:
            return self.worker.ask(CHECK_SECONDS, "check", group, choice.tile)
        except TileFault as fault:
            return self._fault(group, choice, str(fault))

    def _fault(self, group: Group, choice: Choice, reason: str) -> dict:
        say(f"left out: {group}, {words(choice.tile)}: {reason}")
        return {"fault": reason, "group": str(group)}

    def _time(
        self, group: Group, cell: Cell, good: list[Choice],
        hopeless: set[str],
    ) -> None:  # fmt: skip
        today = planned(cell, group.family, self.device)
        timed = [x for x in good if x.digest not in hopeless]
        now = next(
            (i for i, x in enumerate(timed) if x.kernels == today.kernels), 0
        )
        try:
            found = self.worker.ask(
                TIME_SECONDS, "time", cell, group.family,
                [x.tile for x in timed], now, self.options.seconds,
            )  # fmt: skip
        except TileFault as fault:
            say(f"left out: {group}, {cell}: {fault}")
            self.left_out.append(f"{cell}: {fault}")
            return
        rows = []
        for choice, row in zip(timed, found, strict=True):
            if row.pop("hopeless"):
                hopeless.add(choice.digest)
            if "fault" in row:
                say(f"wrong: {group}, {words(choice.tile)}: {row['fault']}")
            rows.append(
                {"tile": as_json(choice.tile), "digest": choice.digest, **row}
            )
        measured = {x.digest for x in timed}
        rows += [
            {"tile": as_json(x.tile), "digest": x.digest}
            for x in good
            if x.digest not in measured
        ]
        rows.sort(key=lambda x: x.get("ms", x.get("quick_ms", 1e9)))
        now_tile = next(
            (x.tile for x in timed if x.kernels == today.kernels), today.tile
        )
        self.record.add(group, cell, now_tile, rows, _today())


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()
