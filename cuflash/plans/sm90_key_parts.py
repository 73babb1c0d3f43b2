"""Parts of the last query tiles of sm90/forward.cu.

Query tiles of full calls take equally long. Blocks take one after another; in
the last round there is seldom one for each. The keys of that round's tiles are
divided among all blocks (sm90/forward_key_parts.cuh), and the parts merged
(sm90/forward_merge.cu).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem

from .kernel import Device, Launch, Plan
from .rounding import ceil_div
from .steps import count_tiles, is_packed, run_tiles

# sm90/forward_key_parts.cuh's LEAST_SHARE.
_LEAST_SHARE = 8

# By head dimensions: key tiles that take longer than parts cost, their stores,
# a launch and the merge. At 128 saving 8 of 286 gained 1.2 %; at 256 saving 6
# of 208 lost 2.6 %, 50 of 1,640 gained 2.2 %. Heads of 64 gained nothing, and
# others were not measured.
_COST = {128: 8, 256: 24}

# Rows that a block of forward_merge.cu merges, a warp each.
_MERGE_WARPS = 8

# Rows of results of so many columns are aligned for TMA as they are.
_ALIGNED_COLUMNS = 8

# Bytes of a work tile beside those of other calls: its first key tile, a slot.
WORK_BYTES = 8


class Shares(NamedTuple):
    """How the key tiles of the last query tiles are divided.

    Attributes
    ----------
    blocks : int
        Of the grid.
    divided : int
        Query tiles whose keys are divided.
    key_tiles, share : int
        Of a query tile, and of a block.
    """

    blocks: int
    divided: int
    key_tiles: int
    share: int


def shares_of(problem: Problem, tile: Tile, device: Device) -> Shares:
    """The shares, if there are any."""
    blocks = device.num_sms * tile.blocks_per_sm
    of_head = count_tiles(problem, problem.seqlen_q, tile.block_q)
    divided = problem.batch * problem.num_heads_q * of_head % blocks
    keys = ceil_div(problem.seqlen_k, tile.block_k)
    share = max(ceil_div(divided * keys, blocks), _LEAST_SHARE)
    return Shares(blocks, divided, keys, share)


def has_key_parts(
    problem: Problem, tile: Tile, device: Device, columns: int
) -> bool:
    """Whether keys are divided: where that saves more than it costs.

    Only in calls without options or mask.

    Parameters
    ----------
    problem, tile, device
    columns : int
        The larger head dimension for which kernels are compiled.
    """
    if (
        problem.causal
        or problem.options
        or problem.return_max_score
        or is_packed(problem)
        or problem.head_dim_v % _ALIGNED_COLUMNS
        or columns not in _COST
        or run_tiles(problem, tile)[1]
    ):
        return False
    blocks, divided, keys, share = shares_of(problem, tile, device)
    of_head = count_tiles(problem, problem.seqlen_q, tile.block_q)
    fills = problem.batch * problem.num_heads_q * of_head >= blocks
    return fills and divided > 0 and keys - share >= _COST[columns]


def with_key_parts(decided: Plan, device: Device) -> Plan:
    """A plan of `has_key_parts` with the parts' memory and their merge."""
    problem, tile, main = decided.problem, decided.tile, decided.launches[-1]
    assert tile is not None
    shares = shares_of(problem, tile, device)
    own = ("MAIN_BLOCKS", main.blocks), ("NUM_WARPS", _MERGE_WARPS)
    merge = replace(
        main.kernel, file="sm90/forward_merge.cu", entry="forward_sm90_merge",
        constants=(*main.kernel.constants, *own), threads=_MERGE_WARPS * 32,
        shared_bytes=0,
    )  # fmt: skip
    rows = shares.divided * tile.block_q
    columns = int(dict(main.kernel.constants)["HEAD_DIM_V"]) + 2  # m and l
    slots = shares.blocks + shares.divided
    return replace(
        decided,
        launches=(
            *decided.launches,
            Launch(merge, rows // _MERGE_WARPS, overlaps=True),
        ),
        workspace=(
            *decided.workspace,
            Buffer("key_parts", 4, slots * tile.block_q * columns),
        ),
    )
