"""The decode calls that are timed: one query per sequence over many keys."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash.request.problem import Problem

from .cells import DIRECTIONS, TOKENS, geometric_mean

PEERS = ("cudnn", "fa2", "flashinfer")
READ = "read"  # the runner that only reads K and V

# How a call is timed; docs/benchmarks/README.md describes each.
PROTOCOLS = ("warm", "flushed", "call")
WARM_CALLS = 20  # in the graph that is replayed warm
FEWEST = 20  # replays, or calls, for a median
FLUSH_BYTES = 256 << 20  # overwritten before a replay; at least twice the L2
PROTOCOL = {
    "unit": "microseconds of GPU time per call, median",
    "warm": f"a replayed graph of {WARM_CALLS} calls",
    "flushed": "a replayed graph of one call, the L2 overwritten before it",
    "call": "a plain call, the L2 overwritten before it",
}


@dataclass(frozen=True)
class DecodeCell:
    """One call: forward, not causal, seqlen_q 1."""

    batch: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"

    direction: ClassVar[str] = "forward"
    causal: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of q and out."""
        return self.batch, 1, self.heads_q, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        """Return the shape of k and v."""
        return self.batch, self.seqlen_k, self.heads_kv, self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together, at two bytes an element."""
        columns = self.heads_kv * self.head_dim
        return 2 * self.batch * self.seqlen_k * columns * 2

    @property
    def row(self) -> dict[str, Any]:
        """Return the cell's fields in a row of the record."""
        return {**asdict(self), "kv_bytes": self.kv_bytes}

    @property
    def problem(self) -> Problem:
        """Return the problem of the call, as cuflash makes it."""
        d = self.head_dim
        return Problem(
            self.direction, self.dtype, self.batch, 1, self.seqlen_k,
            self.heads_q, self.heads_kv, d, d, d**-0.5,
        )  # fmt: skip

    def __str__(self) -> str:
        return label(self.row)


CELLS = tuple(
    DecodeCell(*shape)
    for shape in (
        (1, 1024, 32, 8, 128),
        (1, 4096, 32, 8, 128),
        (1, 8192, 32, 8, 128),
        (1, 65536, 32, 8, 128),
        (16, 8192, 32, 8, 128),
        (128, 2048, 32, 8, 128),
        (64, 8192, 64, 8, 64),
        (8, 32768, 16, 1, 128),
    )
)


def why_no_decode(options: argparse.Namespace) -> str | None:
    """Return an argument that conflicts with --decode, None if none does.

    Called before defaults are filled in, other than argparse's own.
    """
    fixed = ("head_dim", "seqlen", "causal", "width", "heads", "kv_heads")
    shapes = [getattr(options, name) for name in fixed]
    strange = [x for x in options.peer or () if x not in PEERS]
    reasons = {
        "no --options, no --memory and no --import-time":
            options.options is not None
            or options.memory
            or options.import_time,
        "shapes and masks are fixed": any(x is not None for x in shapes)
            or options.tokens != TOKENS,
        "forward only": options.direction != list(DIRECTIONS),
        "bfloat16 only": options.dtype != "bfloat16",
        f"supports only the peers {', '.join(PEERS)}": strange,
    }  # fmt: skip
    return next((word for word, true in reasons.items() if true), None)


def label(row: dict) -> str:
    """Describe a row's shape: batch x seqlen_k, heads q/kv, head_dim."""
    return (
        f"{row['batch']} x {row['seqlen_k']:,}, "
        f"{row['heads_q']}/{row['heads_kv']}, {row['head_dim']}"
    )


# Figures of a row ------------------------------------------------------------


def us(row: dict, name: str, protocol: str) -> float | None:
    """Return a runner's microseconds of GPU time per call."""
    return row["us"].get(name, {}).get(protocol)


def gb_s(row: dict, name: str) -> float | None:
    """Return GB/s of K and V, from a flushed cache."""
    time = us(row, name, "flushed")
    return None if time is None else row["kv_bytes"] / time / 1e3


def over_best_peer(row: dict, protocol: str) -> float | None:
    """Return cuflash's speed over that of the fastest peer."""
    times = [us(row, name, protocol) for name in PEERS]
    return _ratio(
        min((x for x in times if x is not None), default=None),
        us(row, "cuflash", protocol),
    )


def of_read(row: dict, protocol: str) -> float | None:
    """Return cuflash's speed over that of reading alone."""
    return _ratio(us(row, READ, protocol), us(row, "cuflash", protocol))


def _ratio(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other / ours


RATIOS = {"over_best_peer": over_best_peer, "of_read": of_read}


def means(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """Return mean, worst and number of cells, by ratio and protocol.

    Means are geometric; warm and flushed alone.
    """
    found: dict = {}
    for name, ratio in RATIOS.items():
        for protocol in ("warm", "flushed"):
            known = [ratio(row, protocol) for row in rows]
            known = [x for x in known if x is not None]
            if known:
                found.setdefault(name, {})[protocol] = {
                    "cells": len(known),
                    "geometric_mean": geometric_mean(known),
                    "worst": min(known),
                }
    return found
