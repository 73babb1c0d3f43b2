"""The count of what has been tried, and what it found: docs/fuzz.json.

    {"runs": [{"backend": "emulator", "commit": "0123abc",
               "date": "2026-11-26", "device": "",
               "problems": 1000, "seconds": 60,
               "kinds": {"mma forward float16": 120},
               "options": {"causal": 400}, "data": {"peaked": 60},
               "layouts": {"contiguous": 500}}],
     "findings": [{"backend": "gpu", "commit": "0123abc", "date": "2026-11-26",
                   "seed": "123/4", "what": "out[0, 3]: ...", "mended": ""}]}

A finding counts as one until somebody writes into `mended` which commit mended
it, or why it was none.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "docs/fuzz.json"
COUNTS = "kinds", "options", "data", "layouts"
LONGEST = 1000  # characters of a finding: its message and its case


class Tally:
    """One run's counts."""

    def __init__(self, backend: str, commit: str, date: str, device: str = ""):
        self.of = {"backend": backend, "commit": commit, "date": date}
        self.device, self.seconds = device, 0.0
        self.problems = 0
        self.counts: dict[str, Counter[str]] = {x: Counter() for x in COUNTS}
        self.findings: list[dict[str, str]] = []

    def add(self, labels: dict[str, Any]) -> None:
        """Count a problem."""
        self.problems += 1
        kind = labels["dtype"]
        if labels["precision"] and labels["family"] not in (
            labels["precision"],
            "none",
        ):
            kind += f" ({labels['precision']})"
        words = labels["family"], labels["direction"], kind
        self.counts["kinds"][" ".join(words)] += 1
        self.counts["options"].update(labels["options"] or ["none"])
        self.counts["data"][labels["values"]] += 1
        self.counts["layouts"][labels["layout"]] += 1

    def found(self, seed: str, what: str) -> None:
        """Note a finding."""
        self.findings.append(
            {**self.of, "seed": seed, "what": what[:LONGEST], "mended": ""}
        )

    def record(self) -> dict[str, Any]:
        """Return a file's content with this run alone."""
        run = {
            **self.of,
            "device": self.device,
            "problems": self.problems,
            "seconds": round(self.seconds),
            **{
                name: dict(sorted(count.items()))
                for name, count in self.counts.items()
            },
        }
        runs = [run] if self.problems else []
        return {"runs": runs, "findings": self.findings}


def merge(*records: dict[str, Any]) -> dict[str, Any]:
    """Add up records; runs of one backend, commit, date and device are one.

    Of a finding that two records have, the one that says what mended it stays.
    """
    runs: dict[tuple[str, ...], dict[str, Any]] = {}
    findings: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        for run in record["runs"]:
            key = tuple(
                run[x] for x in ("backend", "commit", "date", "device")
            )
            runs[key] = _sum(runs[key], run) if key in runs else run
        for finding in record["findings"]:
            key = tuple(finding[x] for x in ("backend", "commit", "seed"))
            if not findings.get(key, {}).get("mended"):
                findings[key] = finding
    return {
        "runs": sorted(runs.values(), key=lambda x: (x["date"], x["backend"])),
        "findings": list(findings.values()),
    }


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    added = {
        name: dict(sorted((Counter(one[name]) + Counter(other[name])).items()))
        for name in COUNTS
    }
    numbers = {x: one[x] + other[x] for x in ("problems", "seconds")}
    return one | numbers | added


def read(path: Path) -> dict[str, Any]:
    """Read a file; one that is not there has no runs."""
    if not path.exists():
        return {"runs": [], "findings": []}
    return json.loads(path.read_text(encoding="utf-8"))


def add_to(path: Path, *records: dict[str, Any]) -> None:
    """Merge records into a file."""
    text = json.dumps(merge(read(path), *records), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
