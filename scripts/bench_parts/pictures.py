"""TFLOP/s over seqlen: a line a runner, the matrix product's above them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREY = "#222222", "#8a8a8a"
# Okabe and Ito's, which colour-blind readers tell apart; ours comes first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
           "#7f7f7f", "#000000")  # fmt: skip
MARKERS = "osD^vP*X"


def panels(record: dict) -> Iterator[tuple[str, list[dict]]]:
    """Yield (title, rows by seqlen) for each head_dim and mask there is."""
    found: dict[tuple, list[dict]] = {}
    for row in record["rows"]:
        key = row["direction"], row["head_dim"], row["causal"]
        found.setdefault(key, []).append(row)
    for (direction, head_dim, causal), rows in found.items():
        mask = "causal" if causal else "no mask"
        title = f"{direction}, head_dim {head_dim}, {mask}"
        yield title, sorted(rows, key=lambda row: row["seqlen"])


def draw(record: dict, direction: str) -> Figure:
    """Draw all panels of a direction: masks beside, head_dims below."""
    found = [
        (title, rows)
        for title, rows in panels(record)
        if rows[0]["direction"] == direction
    ]
    masks = sorted({rows[0]["causal"] for _, rows in found})
    dims = sorted({rows[0]["head_dim"] for _, rows in found})
    figure = Figure(
        figsize=(4.4 * len(masks) + 0.4, 2.7 * len(dims) + 1.0),
        dpi=150,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(dims), len(masks), sharex=True, sharey=True, squeeze=False
    )
    for title, rows in found:
        axes = grid[dims.index(rows[0]["head_dim"])][
            masks.index(rows[0]["causal"])
        ]
        _panel(axes, title.partition(", ")[2], rows, record)
    for axes in grid[-1]:
        axes.set_xlabel("seqlen", fontsize=8, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s", fontsize=8, color=INK)
    grid[0][0].set_ylim(bottom=0)
    known = {
        name: line
        for axes in grid.flat
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [x for x in record["runners"].values() if x in known]
    names += [x for x in known if x not in names]  # ceilings
    figure.legend(
        [known[x] for x in names], names, loc="outside lower center",
        ncols=min(len(names), 3), frameon=False, fontsize=8,
    )  # fmt: skip
    figure.suptitle(
        f"{direction.capitalize()} passes, {record['rows'][0]['dtype']}, "
        f"{record['device']}, {record['date']}",
        fontsize=10, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _panel(axes, title: str, rows: list[dict], record: dict) -> None:
    axes.set_title(title, loc="left", fontsize=8.5, color=INK)
    names = list(record["runners"])
    # Ours is drawn last, on top.
    for i, name in reversed(list(enumerate(names))):
        points = [
            (row["seqlen"], row["tflops"][name])
            for row in rows
            if name in row["tflops"]
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4 if i else 5,
                linewidth=1.2 if i else 2.2,
                label=record["runners"][name],
            )
    for name, value in record["ceilings"].items():
        if name.startswith("matmul"):
            _, dtype, n, _ = name.split("_")
            axes.axhline(
                value, color=GREY, linewidth=1, linestyle="--",
                label=f"matrix product of {int(n):,}³, {dtype}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    seqlens = sorted({row["seqlen"] for row in rows})
    axes.set_xticks(seqlens, [f"{s:,}" for s in seqlens])
    axes.minorticks_off()
    axes.tick_params(labelsize=7, colors=INK, labelbottom=True)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write(folder: Path, name: str, record: dict) -> list[Path]:
    """Draw a picture for each direction into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for direction in dict.fromkeys(row["direction"] for row in record["rows"]):
        path = folder / f"{name}_{direction}.png"
        draw(record, direction).savefig(path)
        paths.append(path)
    return paths
