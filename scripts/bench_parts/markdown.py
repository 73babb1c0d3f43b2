"""Tables for README and docs, generated from the JSON files only.

A line like

    <!-- bench: h200_wgmma.json forward -->

stands above each table and defines it: files (relative to the document; a cell
is read from the first that has it), optionally a direction, ``causal`` for
causal rows only, ``means`` for geometric means of ratios, ``options`` for
calls with and without options, ``decode`` for decode calls (also with
``means``), ``elsewhere`` for a file and one of other runs, as multiples of
cuDNN's speed (also with ``means``), and optionally lengths (default all). With
lengths, the table has a column per runner; without, cuflash's speed and its
ratios to the peers.

A section whose file does not exist yet is kept in a comment, its marks written
as lines ``bench: ...``, and is uncommented once the file exists:

    <!-- when h200_float64.json is there:
    ...
    -->
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from . import decode_report, other_runs
from .report import beside_plain, figure, ratio_to, summary

MARK = re.compile(r"^<!-- bench: (.+) -->$", re.M)
# A mark and the table below it.
BLOCK = re.compile(r"^(<!-- bench: (.+) -->\n)(?:\n?(?:\|.*\n)+)?", re.M)
WAITING = re.compile(r"^<!-- when (\S+) is there:\n(.*?\n)-->\n", re.M | re.S)
NAMES = {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3",
         "fa4": "FlashAttention-4", "cudnn": "cuDNN", "cupy": "plain CuPy",
         "flashinfer": "FlashInfer", "jax": "cuDNN in JAX",
         "efficient": "memory-efficient",
         "math": "PyTorch's math"}  # fmt: skip


class Wanted(NamedTuple):
    """The table that a mark defines."""

    files: list[str]
    directions: list[str]
    causal_alone: bool
    means: bool
    options: bool
    decode: bool
    elsewhere: bool
    seqlens: list[int]


def parse(text: str) -> Wanted:
    """Read a mark."""
    words = text.split()
    files = [x for x in words if x.endswith(".json")]
    directions = [x for x in words if x in ("forward", "backward")]
    seqlens = [int(x.replace(",", "")) for x in words if x[0].isdigit()]
    kinds = ("causal", "means", "options", "decode", "elsewhere")
    known = {*files, *directions, *kinds}
    strange = [x for x in words if x not in known and not x[0].isdigit()]
    if strange or not files:
        raise ValueError(f"the mark {text!r} has no file, or {strange}")
    return Wanted(
        files,
        directions or ["forward", "backward"],
        *(kind in words for kind in kinds),
        seqlens,
    )


def updated(text: str, folder: Path) -> str:
    """Return a document's text with its tables regenerated."""

    def table(found: re.Match) -> str:
        wanted = parse(found[2])
        records = [
            json.loads((folder / name).read_text()) for name in wanted.files
        ]
        lines = _side_by_side if wanted.seqlens else _with_ratios
        if wanted.means:
            lines = _means
        if wanted.options:
            lines = _options
        if wanted.decode:
            lines = _decode_means if wanted.means else _decode
        if wanted.elsewhere:
            lines = _elsewhere_means if wanted.means else _elsewhere
        return f"{found[1]}\n{chr(10).join(lines(records, wanted))}\n"

    return BLOCK.sub(table, _without_waiting(text, folder))


def _without_waiting(text: str, folder: Path) -> str:
    """Return a document's text, uncommenting sections whose files exist."""

    def section(found: re.Match) -> str:
        if not (folder / found[1]).exists():
            return found[0]
        return re.sub(r"^(bench: .+)$", r"<!-- \1 -->", found[2], flags=re.M)

    return WAITING.sub(section, text)


def _rows(records: list[dict], wanted: Wanted) -> dict[tuple, dict]:
    """Return rows by (direction, head_dim, causal, seqlen)."""
    rows: dict[tuple, dict] = {}
    for record in records:
        for row in record["rows"]:
            key = tuple(
                row[x] for x in ("direction", "head_dim", "causal", "seqlen")
            )
            if key[0] in wanted.directions and "cuflash" in row["tflops"]:
                rows.setdefault(key, row)
    return {
        key: rows[key]
        for direction in wanted.directions
        for key in sorted(rows)
        if key[0] == direction and (key[2] or not wanted.causal_alone)
    }


def _peers(records: list[dict]) -> list[str]:
    names = [x for record in records for x in record["runners"]]
    return [x for x in dict.fromkeys(names) if x != "cuflash"]


def _label(key: tuple, wanted: Wanted) -> str:
    direction, head_dim, causal, _ = key
    label = f"head_dim {head_dim}"
    if len(wanted.directions) > 1:
        label = f"{direction}, {label}"
    if causal and not wanted.causal_alone:
        label += ", causal"
    return label


def _side_by_side(records: list[dict], wanted: Wanted) -> list[str]:
    peers = _peers(records)
    names = " · ".join(["ours", *(NAMES.get(x, x) for x in peers)])
    heads = [f"seqlen {wanted.seqlens[0]:,}"]
    heads += [f"{n:,}" for n in wanted.seqlens[1:]]
    cells: dict[str, dict[int, str]] = {}
    for key, row in _rows(records, wanted).items():
        figures = (row["tflops"].get(x) for x in ("cuflash", *peers))
        cells.setdefault(_label(key, wanted), {})[key[3]] = " · ".join(
            "–" if x is None else figure(x) for x in figures
        )
    return _table(
        [names, *heads],
        [
            [label, *(found.get(n, "–") for n in wanted.seqlens)]
            for label, found in cells.items()
        ],
    )


def _with_ratios(records: list[dict], wanted: Wanted) -> list[str]:
    peers = _peers(records)
    rows = _rows(records, wanted)
    seqlens = sorted({key[3] for key in rows})
    cells: dict[str, dict[int, str]] = {}
    for key, row in rows.items():
        ratios = (ratio_to(row, peer) for peer in peers)
        text = figure(row["tflops"]["cuflash"])
        if peers:
            words = ("–" if x is None else f"{x:.2f}" for x in ratios)
            text += f" ({', '.join(words)})"
        cells.setdefault(_label(key, wanted), {})[key[3]] = text
    first = wanted.directions[0] if len(wanted.directions) == 1 else ""
    return _table(
        [first, *(f"{n:,}" for n in seqlens)],
        [
            [label, *(found.get(n, "–") for n in seqlens)]
            for label, found in cells.items()
        ],
    )


def _means(records: list[dict], wanted: Wanted) -> list[str]:
    rows, peers = _rows(records, wanted), _peers(records)
    heads = ["geometric mean over all cells"]
    for peer in peers:
        heads += [f"over {NAMES.get(peer, peer)}", "worst"]
    lines = []
    for direction in wanted.directions:
        found = [row for key, row in rows.items() if key[0] == direction]
        means = {x["peer"]: x for x in summary(found, peers)}
        figures = []
        for peer in peers:
            if peer in means:
                mean = means[peer]["geometric_mean"]
                count = means[peer]["cells"]
                some = f" ({count} cells)" if count < len(found) else ""
                figures += [f"{mean:.3f}{some}",
                            f"{means[peer]['worst']:.2f}"]  # fmt: skip
            else:
                figures += ["–", "–"]
        if found:
            lines.append([f"{direction}, {len(found)} cells", *figures])
    return _table(heads, lines)


def _options(records: list[dict], wanted: Wanted) -> list[str]:
    rows = [
        row
        for direction in wanted.directions
        for record in records
        for row in record["rows"]
        if row["direction"] == direction
        and (row["causal"] or not wanted.causal_alone)
        and (not wanted.seqlens or row["seqlen"] in wanted.seqlens)
    ]
    several = len({row["head_dim"] for row in rows}) > 1
    lines = []
    for row in rows:
        words = [row["direction"]] if len(wanted.directions) > 1 else []
        words += [f"head_dim {row['head_dim']}"] if several else []
        words += [f"`{row['option']}`"]
        words += ["causal"] if row["causal"] else []
        times = (row["ms"].get(x) for x in ("cuflash", "plain"))
        pairs, faster, *of_pairs = beside_plain(row)
        lines.append(
            [
                ", ".join(words),
                f"{row['seqlen']:,}",
                *("–" if x is None else f"{x:.3f}" for x in times),
                "–" if faster is None else f"{faster:.2f}",
                f"{pairs:.1%}",
                *("–" if x is None else f"{x:.2f}" for x in of_pairs),
            ]
        )
    first = wanted.directions[0] if len(wanted.directions) == 1 else ""
    return _table(
        [first, "seqlen", "ms", "without it", "times as fast",
         "pairs seen", "speed per pair", "per visited pair"],
        lines,
    )  # fmt: skip


def _decode(records: list[dict], wanted: Wanted) -> list[str]:
    return _table(*decode_report.table(records, NAMES))


def _decode_means(records: list[dict], wanted: Wanted) -> list[str]:
    return _table(*decode_report.table_of_means(records))


def _elsewhere(records: list[dict], wanted: Wanted) -> list[str]:
    (direction,) = wanted.directions
    return _table(*other_runs.table(*records, direction))


def _elsewhere_means(records: list[dict], wanted: Wanted) -> list[str]:
    return _table(*other_runs.table_of_means(*records))


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rules = ["---", *["---:"] * (len(heads) - 1)]
    return [f"| {' | '.join(x)} |" for x in (heads, rules, *rows)]
