"""Predictions for a tile without running it."""

from __future__ import annotations

from bench_parts.cells import Cell
from cuflash.plans.tiles import Tile
from cuflash.reference import roofline, traffic

# The schedule of reference.traffic that a family's kernels follow.
SCHEDULES = {
    ("simt", "backward"): traffic.backward_two_pass_counts,
}
DEFAULTS = {
    "forward": traffic.forward_query_outer_counts,
    "backward": traffic.backward_key_outer_counts,
}


def traffic_bytes(cell: Cell, family: str, tile: Tile) -> float:
    """Bytes that a call moves between the caches and the blocks.

    The slow memory of reference.traffic is everything behind shared memory:
    the L2 cache serves part of it. A causal mask removes its share of pairs,
    and about the same share of the traffic per tile.
    """
    counts = (
        SCHEDULES.get((family, cell.direction)) or (DEFAULTS[cell.direction])
    )
    sizes = traffic.Sizes(
        cell.seqlen, cell.seqlen, cell.head_dim, cell.head_dim,
        tile.block_q, tile.block_k,
    )  # fmt: skip
    item = roofline.ITEM_BYTES[cell.dtype]
    moved = traffic.total(counts(sizes)) * item
    if cell.causal:
        whole = traffic.Sizes(
            cell.seqlen, cell.seqlen, cell.head_dim, cell.head_dim,
            cell.seqlen, cell.seqlen,
        )  # fmt: skip
        once = traffic.total(counts(whole)) * item
        moved = once + (moved - once) / 2
    return moved * cell.batch * cell.heads
