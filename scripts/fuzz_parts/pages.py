"""The tables of docs/internals/fuzz.md, from docs/fuzz.json alone.

A line like ``<!-- fuzz: families -->`` stands above each table, which replaces
what is below it, up to the next empty line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import tally

PAGE = tally.FILE.parent / "internals/fuzz.md"
BLOCK = re.compile(r"^(<!-- fuzz: (\w+) -->\n)(?:\n?(?:\|.*\n)+)?", re.M)
BACKENDS = "emulator", "gpu", "tests"
ORDER = (
    "sm90", "sm80", "decode", "decode_sm90", "decode_simt", "fma",
    "mma8_float32", "mma8_float64", "simt",
)  # fmt: skip


def updated(text: str, record: dict[str, Any]) -> str:
    """Return a page's text with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        lines = TABLES[found[2]](record)
        return found[1] + "\n" + "\n".join(lines) + "\n"

    return BLOCK.sub(table, text)


def write() -> None:
    """Make the tables of the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(updated(text, tally.read(tally.FILE)), encoding="utf-8")


def totals(record: dict[str, Any], name: str, backend: str) -> Counter[str]:
    """Add up one kind of counts over a backend's runs."""
    total: Counter[str] = Counter()
    for run in record["runs"]:
        if run["backend"] == backend:
            total.update(run[name])
    return total


def _grid(head: str, counts: dict[str, Counter[str]], rows: list[str]):
    """A row for each name, a column for each counter."""
    lines = [f"| {head} | {' | '.join(counts)} |",
             f"| --- |{' ---: |' * len(counts)}"]  # fmt: skip
    for row in rows:
        cells = (f"{x[row]:,}" if x[row] else "–" for x in counts.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def _backends(record: dict[str, Any]) -> list[str]:
    lines = [
        "| backend | problems | commits | from | to | findings | not mended |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for backend in BACKENDS:
        runs = [x for x in record["runs"] if x["backend"] == backend]
        found = [x for x in record["findings"] if x["backend"] == backend]
        if not runs and not found:
            continue
        dates = sorted(x["date"] for x in runs) or ["–"]
        cells = (
            backend,
            f"{sum(x['problems'] for x in runs):,}",
            f"{len({x['commit'] for x in runs})}",
            dates[0],
            dates[-1],
            f"{len(found)}",
            f"{sum(not x['mended'] for x in found)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _families(record: dict[str, Any]) -> list[str]:
    """Rows: family and direction; columns: dtypes, of all backends."""
    by_dtype: dict[str, Counter[str]] = {}
    for backend in BACKENDS:
        for kind, count in totals(record, "kinds", backend).items():
            family, direction, dtype = kind.split(" ", 2)
            of = by_dtype.setdefault(dtype, Counter())
            of[f"{family}, {direction}"] += count
    rows = {row for counts in by_dtype.values() for row in counts}
    names = dict(sorted(by_dtype.items()))
    return _grid("family, direction", names, sorted(rows, key=_place))


def _place(row: str) -> tuple[int, str]:
    family = row.partition(",")[0]
    known = ORDER.index(family) if family in ORDER else len(ORDER)
    return known, row


def _by_backend(name: str) -> Callable[[dict[str, Any]], list[str]]:
    def table(record: dict[str, Any]) -> list[str]:
        counts = {x: totals(record, name, x) for x in BACKENDS}
        counts = {x: y for x, y in counts.items() if y}
        rows = {row for x in counts.values() for row in x}
        return _grid(name, counts, sorted(rows))

    return table


def _findings(record: dict[str, Any]) -> list[str]:
    lines = ["| date | commit | backend | seed | what | mended by |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for x in record["findings"]:
        what = re.sub(r"[|<>`*_\[\]]", r"\\\g<0>", x["what"].split(" (")[0])
        cells = (x["date"], x["commit"][:7], x["backend"], x["seed"],
                 what[:150], x["mended"] or "**nothing yet**")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "backends": _backends,
    "families": _families,
    "options": _by_backend("options"),
    "data": _by_backend("data"),
    "layouts": _by_backend("layouts"),
    "findings": _findings,
}
