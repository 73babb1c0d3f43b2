"""The picture of scripts/train_forces.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .measuring import Cost

INK, GREY, BLUE, RED = "#222222", "#8a8a8a", "#2166ac", "#c8553d"
COLOURS = {"cuflash": BLUE, "dense": RED}


def draw(
    path: Path,
    errors: np.ndarray,
    unseen: tuple[np.ndarray, np.ndarray],
    costs: Sequence[Cost],
) -> None:
    """Save how forces are learned, and what a step costs."""
    figure = Figure(figsize=(9, 6.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(hspace=0.06, wspace=0.06)
    (left, right), below = figure.subplots(2, 2)
    _draw_errors(left, errors)
    _draw_forces(right, *unseen)
    _draw_costs(below[0], costs, "CPU time of a step, s", "seconds", 1.0)
    _draw_costs(below[1], costs, "Memory of a step, MB", "nbytes", 1e6)
    figure.savefig(path)


def _dress(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_errors(axes: Axes, errors: np.ndarray) -> None:
    steps, training, unseen = errors.T
    axes.semilogy(steps, training, color=BLUE, linewidth=2, label="training")
    axes.semilogy(steps, unseen, color=RED, linewidth=1.4, label="unseen")
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes.annotate(
        "no force at all", (1, 1), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8,
        color=GREY,
    )  # fmt: skip
    _dress(axes, "Error of the forces", "step")
    axes.set_ylim(top=2)
    _label_plainly(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_forces(axes: Axes, forces: np.ndarray, expected: np.ndarray) -> None:
    limit = 1.05 * abs(expected).max()
    axes.plot([-limit, limit], [-limit, limit], color=GREY, linewidth=1)
    axes.plot(
        expected.ravel(), forces.ravel(), ".", color=BLUE, markersize=3,
        alpha=0.5, markeredgewidth=0,
    )  # fmt: skip
    axes.set_aspect("equal")
    axes.set_ylabel("learned", fontsize=9, color=INK)
    _dress(axes, "Forces on unseen atoms", "Morse potential")


def _draw_costs(
    axes: Axes, costs: Sequence[Cost], title: str, what: str, unit: float
) -> None:
    for name, colour in COLOURS.items():
        found = [x for x in costs if x.by == name]
        atoms = [x.atoms for x in found]
        values = [getattr(x, what) / unit for x in found]
        axes.loglog(
            atoms, values, color=colour, marker="o", markersize=4, linewidth=2
        )
        if found:
            axes.annotate(
                name, (atoms[-1], values[-1]), xytext=(-8, 0),
                textcoords="offset points", ha="right", va="bottom",
                fontsize=9, color=colour,
            )  # fmt: skip
    sizes = sorted({x.atoms for x in costs})
    axes.set_xticks(sizes, [f"{x:,}" for x in sizes])
    axes.minorticks_off()
    _label_plainly(axes)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
    _dress(axes, title, "atoms (seqlen)")


def _label_plainly(axes: Axes) -> None:
    """Label powers of ten as numbers: 0.01, 100."""
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
