"""Tile sizes: what a kernel can be asked for, and what was tuned.

`candidates` is the space that a family's kernel is written for; `plan.py`
knows which of them fit a problem and a device. `tuned` reads
``tile_tables/*.json``, one file an architecture.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

TABLES = Path(__file__).parent / "tile_tables"


@dataclass(frozen=True)
class Tile:
    """A block's share of the work, and its warps' shares.

    Attributes
    ----------
    block_q, block_k : int
        Queries and keys.
    num_warps : int
        Warps of a block.
    blocks_per_sm : int
        Blocks that must fit a multiprocessor at once: bounds registers.
    num_stages : int
        Tiles that are loaded in turns: of keys in wgmma's forward pass, of
        queries in backward passes.
    score_warps_q, gradient_warps_k : int
        Backward: warps along the queries of S, dP and dQ; along the keys of
        dK and dV.
    ptxas_level : int
        The assembler's optimisation level. At 3 it may load so far ahead
        that it runs out of registers and spills; at 1 it does not.
    """

    block_q: int
    block_k: int
    num_warps: int
    blocks_per_sm: int = 1
    num_stages: int = 1
    score_warps_q: int = 1
    gradient_warps_k: int = 1
    ptxas_level: int = 1

    def __str__(self) -> str:
        return f"{self.block_q} x {self.block_k}, {self.num_warps} warps"


def candidates(family: str, direction: str) -> Iterator[Tile]:
    """Every tile that a family's kernel is written for, large ones first."""
    if (family, direction) == ("wgmma", "forward"):
        # A warpgroup has 64 queries; one more loads.
        for q, k, stages in product(
            (128, 192), (128, 176, 160, 144, 112, 96, 80, 64), (4, 3, 2)
        ):
            yield Tile(q, k, (q // 64 + 1) * 4, num_stages=stages)
    elif (family, direction) == ("wgmma", "backward"):
        # Two warpgroups have 64 keys each; one more loads.
        for q, stages in product((128, 64), (3, 2)):
            yield Tile(q, 128, 12, num_stages=stages, score_warps_q=q // 16,
                       ptxas_level=3)  # fmt: skip
        # Or three have the same 64 keys.
        for stages in (3, 2):
            yield Tile(64, 64, 16, num_stages=stages, score_warps_q=4,
                       ptxas_level=3)  # fmt: skip
    elif (family, direction) == ("mma", "forward"):
        for q, k, warps in product(
            (128, 64, 32), (128, 64, 32, 16), (4, 8, 2)
        ):
            yield Tile(q, k, warps)
    elif (family, direction) == ("mma", "backward"):
        for q, k, warps, stages in product((128, 64, 32), (128, 64, 32),
                                           (8, 4), (2, 1)):
            for down, down_k in product((4, 2, 8, 1), repeat=2):
                if max(down, down_k) <= warps:
                    yield Tile(q, k, warps, 1, stages, down, down_k)
    else:
        for q, k in product((32, 16, 8, 4), repeat=2):
            yield Tile(q, k, num_warps=4)


@functools.cache
def tuned(
    capability: int,
    family: str,
    direction: str,
    head_dim: int,
    causal: bool,
    seqlen_k: int,
) -> Tile | None:
    """The tuned tile of the newest architecture up to `capability`.

    Its entry for the smallest head_dim that is at least the one asked for,
    and of those the last that begins with so many keys (`from_seqlen`, 0 if
    it is not said). None if there is none.
    """
    known = sorted(int(file.stem[3:]) for file in TABLES.glob("sm_*.json"))
    for arch in reversed([x for x in known if x <= capability]):
        table = json.loads((TABLES / f"sm_{arch}.json").read_text())
        fitting = [
            entry
            for entry in table["tiles"]
            if (entry["family"], entry["direction"]) == (family, direction)
            and entry["head_dim"] >= head_dim
            and entry["causal"] in (causal, None)
            and entry.get("from_seqlen", 0) <= seqlen_k
        ]
        if fitting:
            best = min(
                fitting,
                key=lambda x: (x["head_dim"], -x.get("from_seqlen", 0)),
            )
            return Tile(**best["tile"])
    return None
