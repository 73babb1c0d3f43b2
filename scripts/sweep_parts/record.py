"""Measurements so far, in a file, so that a sweep can resume."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_parts.cells import Cell
from bench_parts.report import save, say
from cuflash.errors import ValueRangeError
from cuflash.plans.plan import Device
from cuflash.plans.tiles import Tile

from .space import Choice, Group, as_json

FORMAT = "cuflash sweep, version 1"
# Figures are comparable where these are the same.
SAME = ("device", "driver", "nvrtc", "num_sms")


class Record:
    """Checks and times, kept in a file from cell to cell.

    Attributes
    ----------
    path : Path
    machine : dict
        As `Gpu.describe` gives it.
    checked : dict
        By a choice's digest: "fault", or "error", "registers" and
        "local_bytes".
    cells : list of dict
        One for each cell: its fields, "family", "today" (a tile), "date" and
        "tiles", with a dict for each tile.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        self.checked: dict[str, dict] = {}
        self.cells: list[dict] = []

    @classmethod
    def read(cls, path: Path) -> Record:
        """A file's record.

        Raises
        ------
        ValueRangeError
            If the file is something else.
        OSError
            If it cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            record = cls(path, dict(content["machine"]))
            Device(**record.machine["plans_see"])
            record.checked = dict(content["checked"])
            for entry in content["cells"]:
                cell_of(entry)
                for tile in (entry, *entry["tiles"]):
                    Tile(**tile.get("tile", entry["today"]))
                record.cells.append(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueRangeError(
                f"{path} is no record of a sweep: {error}"
            ) from error
        return record

    @classmethod
    def open(cls, path: Path, machine: dict[str, Any]) -> Record:
        """Return a file's record if of the same machine, else a new one.

        Renames a file that cannot be used.
        """
        if not path.exists():
            return cls(path, machine)
        try:
            found = cls.read(path)
            other = [x for x in SAME if found.machine.get(x) != machine.get(x)]
            if not other:
                found.machine = machine
                return found
            reason = f"{path} is of another {' and '.join(other)}"
        except ValueRangeError as error:
            reason = str(error)
        aside = path.with_name(f"{path.name}.old")
        path.replace(aside)
        say(f"{reason}; it is now {aside.name}, and a new one begins")
        return cls(path, machine)

    @property
    def device(self) -> Device:
        """The device as plans saw it."""
        return Device(**self.machine["plans_see"])

    def save(self) -> None:
        """Write the file, elsewhere if its folder is not writable."""
        content = {
            "format": FORMAT,
            "machine": self.machine,
            "checked": self.checked,
            "cells": self.cells,
        }
        try:
            save(self.path, content)
        except OSError as error:
            other = Path(tempfile.gettempdir()) / self.path.name
            say(f"{self.path} cannot be written: {error}; {other} is tried")
            save(other, content)

    def add(
        self, group: Group, cell: Cell, today: Tile, tiles: list[dict],
        date: str,
    ) -> None:  # fmt: skip
        """Store a cell's times, replacing earlier ones."""
        fields = {**asdict(cell), "family": group.family}
        self.cells = [x for x in self.cells if key(x) != key(fields)]
        self.cells.append(
            {**fields, "today": as_json(today), "date": date, "tiles": tiles}
        )

    def has(self, group: Group, cell: Cell, swept: list[Choice]) -> bool:
        """Whether every choice was timed in the cell, or is wrong."""
        wanted = key({**asdict(cell), "family": group.family})
        known = {
            x["digest"]
            for entry in self.cells
            if key(entry) == wanted
            for x in entry["tiles"]
        }
        return all(
            x.digest in known or "fault" in self.checked.get(x.digest, ())
            for x in swept
        )


_KEY = ("family", "direction", "dtype", "head_dim", "causal", "seqlen",
        "batch", "heads")  # fmt: skip


def key(entry: dict) -> tuple:
    """The key shared by all entries of a cell."""
    return tuple(entry[name] for name in _KEY)


def cell_of(entry: dict) -> Cell:
    """The cell of an entry."""
    optional = {"precision"}  # older records have none
    return Cell(
        **{
            name: entry[name]
            for name in Cell.__dataclass_fields__
            if name in entry or name not in optional
        }
    )


def timed(entry: dict) -> Iterator[dict]:
    """The completely timed tiles, fastest first."""
    yield from sorted(
        (x for x in entry["tiles"] if "ms" in x), key=lambda x: x["ms"]
    )
