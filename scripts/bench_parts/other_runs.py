"""Tables beside libraries that were measured in other runs.

A record of other runs has no times: its rows give each library's speed as a
multiple of cuDNN's in the run in which both were measured.
"""

from __future__ import annotations

import statistics

from .report import ratio_to

NAMES = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4",
         "fold": "FoldAttention, deterministic"}  # fmt: skip
_KEY = ("direction", "head_dim", "causal", "seqlen")


def multiples(
    ours: dict, others: dict, direction: str
) -> dict[tuple, dict[str, float]]:
    """Speeds as multiples of cuDNN's, by (direction, ..., seqlen).

    cuDNN itself is among them, as 1. A library that ran beside ours counts
    with its speed there.
    """
    elsewhere = {
        tuple(row[x] for x in _KEY): row["over_cudnn"]
        for row in others["rows"]
    }
    found = {}
    for row in ours["rows"]:
        key = tuple(row[x] for x in _KEY)
        ratio = ratio_to(row, "cudnn")
        if row["direction"] == direction and ratio and key in elsewhere:
            speeds = row["tflops"]
            here = {x: speeds[x] / speeds["cudnn"]
                    for x in NAMES if x in speeds}  # fmt: skip
            own = {"cuflash": ratio, "cudnn": 1.0}
            found[key] = own | elsewhere[key] | here
    return found


def table(
    ours: dict, others: dict, direction: str
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: multiples of cuDNN's speed, a column per seqlen."""
    found = multiples(ours, others, direction)
    peers = [x for x in NAMES if any(x in cell for cell in found.values())]
    seqlens = sorted({key[3] for key in found})
    rows: dict[str, list[str]] = {}
    for key, cell in found.items():
        label = f"head_dim {key[1]}{', causal' if key[2] else ''}"
        speeds = (cell.get(x) for x in ("cuflash", *peers))
        rows.setdefault(label, []).append(
            " · ".join("–" if x is None else f"{x:.2f}" for x in speeds)
        )
    names = " · ".join(["ours", *(NAMES[x] for x in peers)])
    heads = [f"{direction}: {names}", *(f"{n:,}" for n in seqlens)]
    return heads, [[label, *cells] for label, cells in rows.items()]


def table_of_means(
    ours: dict, others: dict
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: our speed over each library's, and over the best's."""
    peers = [f"over {x}" for x in NAMES.values()]
    best = ["over the best in each cell", "worst", "cells behind"]
    heads = ["geometric mean", *peers, *best]
    rows = []
    for direction in ("forward", "backward"):
        cells = multiples(ours, others, direction).values()
        means = []
        for peer in NAMES:
            ratios = [x["cuflash"] / x[peer] for x in cells if peer in x]
            means.append(_mean(ratios))
        # A deterministic call is no match for a plain one.
        over_best = [
            x["cuflash"] / max(x.get(y, 0) for y in ("cudnn", "fa3", "fa4"))
            for x in cells
        ]
        if over_best:
            behind = sum(x < 1 for x in over_best)
            rows.append([f"{direction}, {len(over_best)} cells", *means,
                         _mean(over_best), f"{min(over_best):.2f}",
                         str(behind)])  # fmt: skip
    return heads, rows


def _mean(ratios: list[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.3f}" if ratios else "–"
