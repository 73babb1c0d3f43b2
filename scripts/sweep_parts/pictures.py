"""Heat maps: how fast each tile is, over lengths and masks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench_parts.report import figure
from cuflash.plans.tiles import Tile

from .record import Record, cell_of
from .space import words

INK = "#222222"
MOST_ROWS = 24


class Map(NamedTuple):
    """A picture's figures.

    Attributes
    ----------
    name : str
        Name of the file, without suffix.
    rows : list of str
        Tiles, the best in the mean first.
    columns : list of str
    tflops : array, (rows, columns)
        NaN where a tile was not timed.
    best, today : list of int or None
        The row of each column's fastest tile, and of the tile that plan.py
        uses.
    left_out : int
        Number of tiles not shown.
    """

    name: str
    rows: list[str]
    columns: list[str]
    tflops: np.ndarray
    best: list[int | None]
    today: list[int | None]
    left_out: int


def maps(record: Record) -> Iterator[Map]:
    """One for each family, direction, dtype and head_dim."""
    groups: dict[tuple, list[dict]] = {}
    for entry in record.cells:
        known = ("family", "direction", "dtype", "head_dim")
        groups.setdefault(tuple(entry[x] for x in known), []).append(entry)
    for (family, direction, dtype, head_dim), entries in groups.items():
        entries.sort(key=lambda x: (x["causal"], x["seqlen"]))
        name = f"{family}_{direction}_{dtype}_d{head_dim}"
        yield _map(name, entries)


def _map(name: str, entries: list[dict]) -> Map:
    speeds: dict[Tile, dict[int, float]] = {}
    for column, entry in enumerate(entries):
        cell = cell_of(entry)
        for x in entry["tiles"]:
            ms = x.get("ms", x.get("quick_ms"))
            if ms and "fault" not in x:
                tile = Tile(**x["tile"])
                speeds.setdefault(tile, {})[column] = cell.tflops(ms)
    fastest = [
        max((x[c] for x in speeds.values() if c in x), default=1.0)
        for c in range(len(entries))
    ]

    def mean_share(tile: Tile) -> float:
        # A tile that was left out was too slow for the second measurement.
        return statistics.fmean(
            speeds[tile].get(c, 0) / fastest[c] for c in range(len(entries))
        )

    ordered = sorted(speeds, key=mean_share, reverse=True)
    today = [Tile(**entry["today"]) for entry in entries]
    winners = [
        max((x for x in speeds if c in speeds[x]),
            key=lambda x, c=c: speeds[x][c], default=None)
        for c in range(len(entries))
    ]  # fmt: skip
    wanted = {*ordered[:MOST_ROWS], *winners, *today}
    shown = [tile for tile in ordered if tile in wanted]
    table = np.full((len(shown), len(entries)), np.nan)
    for row, tile in enumerate(shown):
        for column, speed in speeds[tile].items():
            table[row, column] = speed
    best = [
        int(np.nanargmax(column)) if not np.isnan(column).all() else None
        for column in table.T
    ]
    return Map(
        name,
        [words(tile) for tile in shown],
        [
            f"{x['seqlen']:,}{' causal' if x['causal'] else ''}"
            for x in entries
        ],
        table,
        best,
        [shown.index(x) if x in shown else None for x in today],
        len(ordered) - len(shown),
    )


def draw(found: Map, title: str) -> Figure:
    """The picture: colour by share of the column's fastest, figures in it."""
    rows, columns = found.tflops.shape
    canvas = Figure(
        figsize=(2.6 + 0.62 * columns, 1.9 + 0.24 * rows),
        dpi=150,
        layout="constrained",
    )
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    fastest = np.nanmax(found.tflops, axis=0)
    share = found.tflops / fastest
    image = axes.imshow(
        share, cmap="viridis", vmin=0.5, vmax=1.0, aspect="auto"
    )
    for row in range(rows):
        for column in range(columns):
            value = found.tflops[row, column]
            if np.isnan(value):
                continue
            is_best = found.best[column] == row
            axes.text(
                column, row, figure(value), ha="center", va="center",
                fontsize=6.5, weight="bold" if is_best else "normal",
                color=INK if share[row, column] > 0.8 else "white",
            )  # fmt: skip
    for column, row in enumerate(found.today):
        if row is not None:
            axes.add_patch(_frame(column, row))
    axes.set_xticks(
        range(columns), found.columns, rotation=45, ha="right", fontsize=7
    )
    axes.set_yticks(range(rows), found.rows, fontsize=7)
    axes.tick_params(length=0, colors=INK)
    axes.set_xlabel("seqlen", fontsize=8, color=INK)
    note = "TFLOP/s; red frame: the tile in use; bold: the fastest"
    if found.left_out:
        note += f"; {found.left_out} slower tiles left out"
    canvas.suptitle(
        f"{found.name.replace('_', ' ')}, {title}", fontsize=9, color=INK,
        x=0.01, ha="left",
    )  # fmt: skip
    axes.set_title(note, loc="left", fontsize=7, color=INK)
    bar = canvas.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("of the column's fastest", fontsize=7, color=INK)
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    return canvas


def _frame(column: int, row: int):
    from matplotlib.patches import Rectangle

    return Rectangle(
        (column - 0.46, row - 0.44), 0.92, 0.88, fill=False,
        edgecolor="#d62728", linewidth=1.4,
    )  # fmt: skip


def write(folder: Path, record: Record) -> list[Path]:
    """Draw all maps of a record into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for found in maps(record):
        path = folder / f"{found.name}.png"
        draw(found, record.machine["device"]).savefig(path)
        paths.append(path)
    return paths
