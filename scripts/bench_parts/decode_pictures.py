"""GB/s of K and V in decode calls: a line per runner, and reading alone."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .decode import READ, gb_s
from .pictures import COLOURS, GREY, INK, MARKERS


def draw(record: dict) -> Figure:
    """Draw one sequence over seqlen_k, and beside it batches."""
    one = [row for row in record["rows"] if row["batch"] == 1]
    more = [row for row in record["rows"] if row["batch"] > 1]
    panels = [x for x in (one, more) if x]
    figure = Figure(
        figsize=(4.6 * len(panels) + 0.4, 3.9), dpi=150, layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, rows in zip(grid, panels, strict=True):
        _panel(axes, sorted(rows, key=lambda x: x["seqlen_k"]), record)
    grid[0].set_ylabel("GB/s of K and V, L2 flushed", fontsize=8, color=INK)
    grid[0].set_ylim(bottom=0)
    known = {
        name: line
        for axes in grid
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [x for x in record["runners"].values() if x in known]
    figure.legend(
        [known[x] for x in names], names, loc="outside lower center",
        ncols=min(len(names), 3), frameon=False, fontsize=8,
    )  # fmt: skip
    dtype = record["rows"][0]["dtype"]
    figure.suptitle(
        f"One query per sequence, {dtype}, {record['device']}, "
        f"{record['date']}",
        fontsize=10, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _panel(axes, rows: list[dict], record: dict) -> None:
    """Draw rows side by side: few lengths, each with heads of its own."""
    several = rows[-1]["batch"] > 1
    title = "several sequences" if several else "one sequence"
    axes.set_title(title, loc="left", fontsize=8.5, color=INK)
    names = list(record["runners"])
    # cuflash is drawn last, on top.
    for i, name in reversed(list(enumerate(names))):
        points = [
            (at, rate)
            for at, rate in enumerate(gb_s(row, name) for row in rows)
            if rate is not None
        ]
        if not points:
            continue
        style = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4 if i else 5,
            "linewidth": 1.2 if i else 2.2,
        }
        if name == READ:
            style = {"color": GREY, "linestyle": "--", "linewidth": 1}
        axes.plot(
            *zip(*points, strict=True), label=record["runners"][name], **style
        )
    axes.set_xticks(range(len(rows)), [_tick(row) for row in rows])
    axes.set_xlabel(
        "seqlen_k, batch, heads q/kv and head_dim", fontsize=8, color=INK
    )
    axes.tick_params(labelsize=7, colors=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _tick(row: dict) -> str:
    heads = f"{row['heads_q']}/{row['heads_kv']}, {row['head_dim']}"
    return f"{row['seqlen_k']:,}\nx {row['batch']}\n{heads}"


def write(folder: Path, name: str, record: dict) -> list[Path]:
    """Draw the picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    draw(record).savefig(path)
    return [path]
