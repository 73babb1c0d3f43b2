"""Prints rows of decode calls, and makes their tables."""

from __future__ import annotations

from .decode import (
    PROTOCOLS,
    READ,
    gb_s,
    label,
    means,
    of_read,
    over_best_peer,
    us,
)

RATIO_NAMES = {"over_best_peer": "over the best peer",
               "of_read": "of reading alone"}  # fmt: skip


def heading(names: list[str]) -> str:
    """Return the heading of the rows."""
    columns = "".join(f"{name:>21}" for name in names)
    return (
        f"{'batch x seqlen_k, heads, d':27}{columns}{'GB/s':>7}"
        f"{'/ best peer':>13}{'/ read':>12}   us {'/'.join(PROTOCOLS)}"
    )


def line(row: dict, names: list[str]) -> str:
    """Return one row as text; ratios are warm/flushed."""
    columns = "".join(f"{_times(row, name, PROTOCOLS):>21}" for name in names)
    return (
        f"{label(row):27}{columns}{_rate(row):>7}"
        f"{_ratios(row, over_best_peer):>13}{_ratios(row, of_read):>12}"
    )


def lines(record: dict) -> list[str]:
    """Return the lines of a record, as `bench.py` printed them."""
    names = list(record["runners"])
    return [
        heading(names),
        *(line(row, names) for row in record["rows"]),
        *lines_of_means(record.get("means", {})),
    ]


def lines_of_means(found: dict) -> list[str]:
    """Return a line for each ratio, warm and flushed."""
    return [
        f"{RATIO_NAMES[name]}, {protocol}: geometric mean "
        f"{x['geometric_mean']:.3f} of {x['cells']} rows, "
        f"worst {x['worst']:.2f}"
        for name, protocols in found.items()
        for protocol, x in protocols.items()
    ]


def table(
    records: list[dict], titles: dict[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table: us warm / flushed, and ratios."""
    names = list(dict.fromkeys(x for r in records for x in r["runners"]))
    titles = {**titles, READ: "reading alone"}
    heads = [
        "batch x seqlen_k, heads q/kv, head_dim",
        *(titles.get(name, name) for name in names),
        "GB/s",
        "over the best peer",
        "of reading",
    ]
    return heads, [
        [
            label(row),
            *(_times(row, name, PROTOCOLS[:2], " / ") for name in names),
            _rate(row),
            _ratios(row, over_best_peer, " / "),
            _ratios(row, of_read, " / "),
        ]
        for record in records
        for row in record["rows"]
    ]


def table_of_means(records: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the geometric means."""
    found = means([row for record in records for row in record["rows"]])
    heads = ["geometric mean over all rows", "warm", "worst", "flushed",
             "worst"]  # fmt: skip
    return heads, [
        [
            RATIO_NAMES[name],
            *(
                text
                for protocol in PROTOCOLS[:2]
                for text in _mean(protocols.get(protocol))
            ),
        ]
        for name, protocols in found.items()
    ]


def _mean(found: dict | None) -> tuple[str, str]:
    if found is None:
        return "–", "–"
    return f"{found['geometric_mean']:.3f}", f"{found['worst']:.2f}"


def _times(
    row: dict, name: str, protocols: tuple[str, ...], between: str = "/"
) -> str:
    times = [us(row, name, protocol) for protocol in protocols]
    return between.join("–" if x is None else f"{x:.1f}" for x in times)


def _rate(row: dict) -> str:
    rate = gb_s(row, "cuflash")
    return "–" if rate is None else f"{rate:,.0f}"


def _ratios(row: dict, ratio, between: str = "/") -> str:
    found = [ratio(row, protocol) for protocol in PROTOCOLS[:2]]
    return between.join("–" if x is None else f"{x:.2f}" for x in found)
