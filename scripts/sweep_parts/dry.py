"""A sweep without a GPU: compiler reports and predicted traffic of tiles."""

from __future__ import annotations

import time
from typing import Any

from bench_parts.report import say, show
from cuflash.build import nvrtc
from cuflash.errors import CompileError
from cuflash.plans.plan import Device, KernelPlan, occupancy

from .compiling import Compiler
from .meter import Meter
from .predict import traffic_bytes
from .space import Choice, Group, as_json, choices, words

GIB = 1 << 30
SEQLEN = 4096  # of the predicted traffic, if it is among those asked for


def run(
    groups: list[Group], device: Device, options: Any, until: float,
    rows: list[dict],
) -> bool:  # fmt: skip
    """Compile every group's kernels; add a dict per tile to `rows`.

    If interrupted, `rows` has those compiled so far. Returns whether all were
    compiled.
    """
    swept = {group: options.chosen(choices(group, device)) for group in groups}
    total = sum(map(len, swept.values()))

    def report(kernel: KernelPlan) -> nvrtc.Report:
        return nvrtc.report(kernel, device.arch)

    with Compiler(report, options.jobs) as pool, Meter(total, "") as meter:
        for group, listed in swept.items():
            meter.step(0, str(group))
            found: list[dict] = []
            try:
                _group(
                    group, listed, device, options, pool, until, meter, found
                )
            finally:
                rows += _in_order(found, listed)
                if found:
                    _show(group, found)
            if time.monotonic() >= until:
                say(f"the time is up: {meter.done} of {total} were compiled")
                break
        return meter.done == total


def _group(
    group: Group, listed: list[Choice], device: Device, options: Any,
    pool: Compiler, until: float, meter: Meter, rows: list[dict],
) -> None:  # fmt: skip
    cells = options.cells(group)
    cell = next((x for x in cells if x.seqlen == SEQLEN), cells[-1])
    reports: dict[KernelPlan, Any] = {}
    kernels = [k for choice in listed for k in choice.main(group.family)]
    left = list(listed)
    for kernel, report in pool.results(list(dict.fromkeys(kernels)), until):
        reports[kernel] = report
        for choice in [
            c for c in left if all(k in reports for k in c.main(group.family))
        ]:
            left.remove(choice)
            meter.step()
            rows.append(_row(group, choice, reports, device, cell))


def _in_order(rows: list[dict], listed: list[Choice]) -> list[dict]:
    digests = [choice.digest for choice in listed]
    rows.sort(key=lambda row: digests.index(row["digest"]))
    return rows


def _row(group, choice, reports, device, cell) -> dict:
    row = {
        "group": str(group),
        "tile": as_json(choice.tile),
        "words": words(choice.tile),
        "digest": choice.digest,
        "seqlen": cell.seqlen,
        "traffic_bytes": traffic_bytes(cell, group.family, choice.tile),
    }
    kernels = choice.main(group.family)
    for kernel in kernels:
        if isinstance(reports[kernel], CompileError):
            return {**row, "fault": str(reports[kernel])}
    held = [occupancy(k, reports[k].registers, device) for k in kernels]
    blocks, share = min(held)
    return {
        **row,
        "registers": max(reports[k].registers for k in kernels),
        "spill_bytes": max(reports[k].spill_bytes for k in kernels),
        "shared_bytes": max(reports[k].shared_bytes for k in kernels),
        "blocks_per_sm": blocks,
        "occupancy": share,
    }


def _show(group: Group, rows: list[dict]) -> None:
    show(
        str(group),
        ["tile", "registers", "spilled bytes", "shared KiB", "blocks/SM",
         "occupancy", "traffic GiB"],
        [
            [
                row["words"],
                *(
                    ["does not compile"] + [""] * 4
                    if "fault" in row
                    else [
                        str(row["registers"]),
                        str(row["spill_bytes"] or ""),
                        f"{row['shared_bytes'] / 1024:.0f}",
                        str(row["blocks_per_sm"]),
                        f"{row['occupancy']:.0%}",
                    ]
                ),
                f"{row['traffic_bytes'] / GIB:.2f}",
            ]
            for row in rows
        ],
    )  # fmt: skip
