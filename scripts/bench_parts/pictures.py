"""TFLOP/s over seqlen: a line per runner, and the matmul's ceiling."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GREY = "#222222", "#8a8a8a"
# Okabe and Ito's palette, for colour-blind readers; cuflash comes first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
           "#7f7f7f", "#000000")  # fmt: skip
MARKERS = "osD^vP*X"


Key = tuple[str, int, bool]  # direction, head_dim, causal
DIRECTION, HEAD_DIM, CAUSAL = range(3)


def panels(record: dict) -> dict[Key, list[dict]]:
    """Return rows by seqlen, for each direction, head_dim and mask."""
    found: dict[Key, list[dict]] = {}
    for row in record["rows"]:
        key = row["direction"], row["head_dim"], row["causal"]
        found.setdefault(key, []).append(row)
    return {
        key: sorted(rows, key=lambda row: row["seqlen"])
        for key, rows in found.items()
    }


def draw(record: dict, direction: str) -> Figure:
    """Draw all panels of a direction: a column per mask."""
    found = {
        key: rows
        for key, rows in panels(record).items()
        if key[DIRECTION] == direction
    }
    title = f"{direction.capitalize()} passes"
    return _draw(record, found, title, HEAD_DIM, CAUSAL, (4.4, 2.7))


def overview(record: dict) -> Figure:
    """Draw causal panels: a column per head_dim, a row per direction.

    Uses unmasked panels if there are no causal ones.
    """
    found = panels(record)
    mask = any(key[CAUSAL] for key in found)
    found = {key: rows for key, rows in found.items() if key[CAUSAL] == mask}
    title = "Causal attention" if mask else "Attention"
    return _draw(record, found, title, DIRECTION, HEAD_DIM, (3.1, 2.3))


def _draw(
    record: dict, found: dict[Key, list[dict]], title: str,
    down: int, across: int, size: tuple[float, float],
) -> Figure:  # fmt: skip
    """Draw panels in a grid by `down` and `across`, each of `size`."""
    downs = list(dict.fromkeys(key[down] for key in found))
    acrosses = sorted({key[across] for key in found})
    figure = Figure(
        figsize=(
            size[0] * len(acrosses) + 0.4,
            size[1] * len(downs) + 1.0,
        ),
        dpi=150,
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(downs), len(acrosses), sharex=True, sharey=True, squeeze=False
    )
    for key, rows in found.items():
        axes = grid[downs.index(key[down])][acrosses.index(key[across])]
        name = f"head_dim {key[HEAD_DIM]}"
        if DIRECTION in (down, across):
            name = f"{key[DIRECTION]}, {name}"
        if CAUSAL in (down, across):
            name += ", causal" if key[CAUSAL] else ", no mask"
        _panel(axes, name, rows, record)
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
    row = record["rows"][0]
    dtype = row["dtype"]
    if row.get("precision"):
        dtype += f" ({row['precision']})"
    figure.suptitle(
        f"{title}, {dtype}, {record['device']}, {record['date']}",
        fontsize=10, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _panel(axes, title: str, rows: list[dict], record: dict) -> None:
    axes.set_title(title, loc="left", fontsize=8.5, color=INK)
    names = list(record["runners"])
    # cuflash is drawn last, on top.
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
                label=f"matmul of {int(n):,}³, {dtype}",
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
    """Draw an overview and one picture per direction into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: overview(record)}
    for direction in dict.fromkeys(row["direction"] for row in record["rows"]):
        drawn[f"{name}_{direction}"] = draw(record, direction)
    paths = []
    for stem, figure in drawn.items():
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1])
    return paths
