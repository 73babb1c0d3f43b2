"""Prints results, and writes them as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from . import decode_report
from .cells import Cell, geometric_mean


def say(text: str = "") -> None:
    """Print a line and flush, so that a pipe shows it at once."""
    print(text, flush=True)


def first_line(error: Exception) -> str:
    """Return an error's first line: PyTorch's messages are long."""
    return str(error).strip().partition("\n")[0]


def figure(tflops: float) -> str:
    """Format to three digits, so that 1 % shows in slow ones too."""
    return f"{tflops:.0f}" if tflops >= 99.95 else f"{tflops:.1f}"


def heading(names: list[str]) -> str:
    """Return the heading of the rows."""
    columns = "".join(f"{name:>10} {'+-':>5}" for name in names)
    ratios = "".join(f"{'/ ' + name:>9}" for name in names[1:])
    return (
        f"{'':8} {'d':>3} {'mask':6} {'seqlen':>6} {columns}{ratios}   TFLOP/s"
    )


def line(row: dict, names: list[str]) -> str:
    """Return one cell's row as text."""
    columns = "".join(
        f"{row['tflops'][n]:10.1f} {row['spread'][n]:5.1%}"
        if n in row["tflops"]
        else f"{'-':>10} {'':5}"
        for n in names
    )
    ratios = "".join(f"{_ratio_text(row, n):>9}" for n in names[1:])
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['direction']:8} {row['head_dim']:3} {mask:6} "
        f"{row['seqlen']:6} {columns}{ratios}"
    )


def _ratio_text(row: dict, name: str) -> str:
    ratio = ratio_to(row, name)
    return "-" if ratio is None else f"{ratio:.2f}"


def ratio_to(row: dict, peer: str) -> float | None:
    """Return cuflash's speed over a peer's."""
    figures = row["tflops"]
    if peer not in figures or "cuflash" not in figures:
        return None
    return figures["cuflash"] / figures[peer]


def lines(record: dict) -> list[str]:
    """Return the lines of a record's table, as `bench.py` printed them."""
    rows = record["rows"]
    if "options" in record:
        return [option_heading(), *map(option_line, rows)]
    if "decode" in record:
        return decode_report.lines(record)
    names = list(record["runners"])
    return [heading(names), *(line(row, names) for row in rows)]


def option_heading() -> str:
    """Return the heading of rows of calls with options."""
    return (
        f"{'':8} {'option':12} {'d':>3} {'mask':6} {'seqlen':>6} {'ms':>9} "
        f"{'+-':>5} {'without':>9} {'+-':>5} {'faster':>7} {'pairs':>7} "
        f"{'a pair':>7} {'visited':>7}"
    )


def option_line(row: dict) -> str:
    """Return the row of one call with an option as text."""
    times = "".join(
        f"{row['ms'][n]:10.3f} {row['spread'][n]:5.1%}"
        if n in row["ms"]
        else f"{'-':>10} {'':5}"
        for n in ("cuflash", "plain")
    )
    found = beside_plain(row)
    ratios = f"{'-':>8}{found.pairs:8.1%}{'-':>8}{'-':>8}"
    if found.faster is not None:
        ratios = (
            f"{found.faster:8.2f}{found.pairs:8.1%}{found.of_a_pair:8.2f}"
            f"{found.of_a_visited:8.2f}"
        )
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['direction']:8} {row['option']:12} {row['head_dim']:3} "
        f"{mask:6} {row['seqlen']:6}{times}{ratios}"
    )


class BesidePlain(NamedTuple):
    """A call with an option, relative to the same call without.

    Attributes
    ----------
    pairs : float
        The share of visible pairs.
    faster, of_a_pair, of_a_visited : float or None
        The ratio of speeds: per call, per visible pair, and per pair of the
        tiles with a visible pair.
    """

    pairs: float
    faster: float | None
    of_a_pair: float | None
    of_a_visited: float | None


def beside_plain(row: dict) -> BesidePlain:
    """Return the ratios of a row."""
    pairs, ms = row["pairs"] / row["plain_pairs"], row["ms"]
    if "cuflash" not in ms or "plain" not in ms:
        return BesidePlain(pairs, None, None, None)
    faster = ms["plain"] / ms["cuflash"]
    visited = row["visited"] / row["plain_visited"]
    return BesidePlain(pairs, faster, pairs * faster, visited * faster)


def summary(rows: list[dict], peers: list[str]) -> list[dict]:
    """Return the geometric mean and the worst cell, by direction and peer."""
    found = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        for peer in peers:
            ratios = [
                (ratio_to(row, peer), row)
                for row in rows
                if row["direction"] == direction and ratio_to(row, peer)
            ]
            if ratios:
                worst, row = min(ratios, key=lambda pair: pair[0])
                found.append(
                    {
                        "direction": direction,
                        "peer": peer,
                        "cells": len(ratios),
                        "geometric_mean": geometric_mean(
                            [ratio for ratio, _ in ratios]
                        ),
                        "worst": worst,
                        "worst_cell": str(cell_of(row)),
                    }
                )
    return found


def cell_of(row: dict) -> Cell:
    """Return the cell of a row."""
    names = [name for name in Cell.__dataclass_fields__ if name in row]
    return Cell(**{name: row[name] for name in names})


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; text is left-aligned, numbers right-aligned."""
    if sys.stdout.isatty():  # rich would cut a pipe's lines to 80 columns
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [
        max(map(len, column)) for column in zip(columns, *rows, strict=True)
    ]
    say(title)
    for row in [columns, *rows]:
        first, *others = (
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        say("  ".join([first, *others]))


def show_summary(found: list[dict]) -> None:
    """Print the result of `summary`."""
    show(
        "cuflash's speed over the peer's",
        ["", "cells", "geometric mean", "worst", "where"],
        [
            [
                f"{x['direction']} / {x['peer']}",
                str(x["cells"]),
                f"{x['geometric_mean']:.3f}",
                f"{x['worst']:.2f}",
                x["worst_cell"],
            ]
            for x in found
        ],
    )


def save(path: Path, content: dict) -> None:
    """Write JSON atomically: the old file stays until the new is complete.

    A record of a list is one line, and so is any other value.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(_by_lines(content))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _by_lines(content: dict) -> str:
    def of(value: object) -> str:
        if isinstance(value, list) and value:
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    lines = (f" {json.dumps(name)}: {of(x)}" for name, x in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
