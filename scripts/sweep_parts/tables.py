"""From a record to the tables that plan.py reads."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bench_parts.report import say
from cuflash import folders
from cuflash.errors import ValueRangeError
from cuflash.plans import tiles
from cuflash.plans.plan import Device, plan, tuned_by
from cuflash.plans.tiles import Entry, Tile

from .record import Record, cell_of, timed
from .space import Group, as_json, dtype_of

# A smaller gain is noise and does not change the tile.
WORTH = 0.005
NOTE = "lines with 'measured' come from scripts/sweep_blocks.py"


class Verdict(NamedTuple):
    """A cell's best tile and today's; unknown times are None."""

    group: Group
    seqlen: int
    today: Tile
    best: Tile
    today_ms: float | None
    best_ms: float | None
    spread: float | None
    tflops: float | None

    @property
    def gain(self) -> float | None:
        """How much faster the best is, 0.1 meaning a tenth."""
        if self.today_ms is None or self.best_ms is None:
            return None
        return self.today_ms / self.best_ms - 1


def verdicts(record: Record) -> list[Verdict]:
    """The verdict for each cell of a record that has times."""
    found = []
    for entry in record.cells:
        finished = list(timed(entry))
        if not finished:
            continue
        today = Tile(**entry["today"])
        known = {Tile(**x["tile"]): x for x in finished}
        best, now = finished[0], known.get(today)
        if now and now["ms"] <= best["ms"] * (1 + WORTH):
            best = now
        cell = cell_of(entry)
        found.append(
            Verdict(
                group_of(entry),
                cell.seqlen,
                today,
                Tile(**best["tile"]),
                now and now["ms"],
                best["ms"],
                best["spread"],
                cell.tflops(best["ms"]),
            )
        )
    return found


def group_of(entry: dict) -> Group:
    """The group of a record's cell."""
    return Group(**{name: entry[name] for name in Group.__dataclass_fields__})


def lines(record: Record) -> list[dict[str, Any]]:
    """A record's cells as lines of a table."""
    machine, device = record.machine, record.device
    finished = [entry for entry in record.cells if any(timed(entry))]
    made = []
    for entry, verdict in zip(finished, verdicts(record), strict=True):
        cell, group = cell_of(entry), verdict.group
        problem = group.problem(cell.batch, cell.seqlen, cell.heads)
        seqlen, load = tuned_by(problem, device)
        named = {"gpu": device.name, "bandwidth": device.bandwidth}
        made.append(
            {
                "family": group.family,
                "direction": group.direction,
                "dtype": group.dtype,
                "head_dim": group.head_dim,
                "causal": group.causal,
                "seqlen": seqlen,
                "tiles_per_sm": round(load, 2),
                **{k: v for k, v in named.items() if v is not None},
                "tile": as_json(verdict.best),
                "measured": {
                    "device": machine["device"],
                    "driver": machine["driver"],
                    "nvrtc": machine["nvrtc"],
                    "date": entry["date"],
                    "ms": round(verdict.best_ms, 5),
                    "spread": round(verdict.spread, 4),
                    "tflops": round(verdict.tflops, 1),
                },
            }
        )
    return made


def merge(folder: Path, record: Record) -> Path:
    """Put a record's lines into the table of a folder.

    Replaces lines of the same problems and GPU, keeps the others. Renames a
    file that is no table.
    """
    arch = f"sm_{record.device.capability}"
    path = folder / f"{arch}.json"
    kept, head = [], {}
    if path.exists():
        try:
            kept = [_line(entry) for entry in tiles.read_table(path)]
            head = json.loads(path.read_text(encoding="utf-8"))
        except ValueRangeError as error:
            aside = path.with_name(f"{path.name}.broken")
            path.replace(aside)
            say(f"{error}; it is now {aside.name}, and a new one begins")
    new = lines(record)
    replaced = {_what(line) for line in new}
    kept = [line for line in kept if _what(line) not in replaced]
    write(path, arch, [*kept, *new], head)
    tiles.entries.cache_clear()
    return path


def _line(entry: Entry) -> dict[str, Any]:
    line = {k: v for k, v in asdict(entry).items() if v is not None}
    del line["arch"]
    return {**line, "tile": as_json(entry.tile)}


_FIELDS = ("family", "direction", "head_dim", "dtype", "causal", "option",
           "seqlen", "tiles_per_sm", "needs", "reach")  # fmt: skip
_ORDER = (*_FIELDS, *tiles.GPU_FIELDS, "tile", "measured")


def _what(line: dict[str, Any]) -> tuple:
    """The key of a line: its problem and GPU.

    Sweeps once wrote the GPU's name only among what they measured.
    """
    gpu = line.get("gpu") or line.get("measured", {}).get("device")
    return *(line.get(name) for name in _FIELDS), gpu


def write(
    path: Path, arch: str, table: list[dict], old: dict[str, Any]
) -> None:
    """Write a table atomically, one line per entry.

    Keeps note and GPU of the old table. Lines for that GPU come before those
    of the same problem for others, and need not name it.
    """
    head = {"format": tiles.FORMAT, "arch": arch}
    head |= {name: old[name] for name in tiles.GPU_FIELDS if name in old}
    head["note"] = old.get("note") or NOTE
    ordered = sorted(
        (_unnamed(line, head) for line in table),
        key=lambda x: [
            (v is not None, v or 0)
            for v in (x.get(name) for name in (*_FIELDS, "gpu"))
        ],
    )
    text = ",\n".join(
        "  " + json.dumps({k: x[k] for k in _ORDER if k in x}) for x in ordered
    )
    opening = json.dumps(head, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(f'{opening},\n "tiles": [\n{text}\n ]\n}}\n')
        tiles.parse_table(draft.read_bytes(), arch)  # check it
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _unnamed(line: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """A line without the fields that it shares with its table's head."""
    if line.get("gpu") != head.get("gpu"):
        return {"gpu": None, **line}
    return {k: v for k, v in line.items() if k not in tiles.GPU_FIELDS}


def against(
    path: Path, device: Device, record: Record | None
) -> list[Verdict]:
    """Compare a table's tiles with today's, with times from a record."""
    found = []
    for entry in tiles.read_table(path):
        group = Group(
            entry.family,
            entry.direction,
            entry.dtype or dtype_of([entry.family]),
            entry.head_dim,
            bool(entry.causal),
        )
        seqlen = entry.seqlen or 4096
        today = plan(group.problem(1, seqlen, 16), device, group.family)
        known = {}
        for cell in record.cells if record else ():
            if group_of(cell) == group and cell["seqlen"] == seqlen:
                known = {Tile(**x["tile"]): x for x in timed(cell)}
        ms = [known.get(x, {}).get("ms") for x in (today.tile, entry.tile)]
        found.append(
            Verdict(
                group, seqlen, today.tile, entry.tile, *ms, None,
                (entry.measured or {}).get("tflops"),
            )
        )  # fmt: skip
    return found


def shadowed(folder: Path) -> bool:
    """Whether this machine has tables that take precedence over a folder's."""
    own = folders.tile_tables()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return own != folder and bool(tiles.entries(own))
