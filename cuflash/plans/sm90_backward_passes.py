"""Plans of the wgmma kernel for backward passes with large head dimensions."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import round_up
from .sm90 import (
    MBARRIER_BYTES,
    buffers_of_options,
    has_wide_heads,
    head_dims,
    score_bends,
    scores_twice,
)
from .sm90_backward import heads_innermost, rows_kernel
from .steps import (
    count_tiles,
    gradients_of_rows,
    has_lse_rests,
    heads_per_section,
    is_packed,
    kernel_of,
    key_tiles,
    lse_rest_buffers,
    lse_rest_launches,
    option_launches,
    query_tiles,
    tile_bytes,
    without_sums,
)

_MOST_HEAD_DIM = 512

_TILE, _PANEL_COLUMNS = 64, 64

# sm90/backward_passes.cu: PASS, in the order of launches. The pass of dK also
# recomputes rows of dV.
_DQ, _DK, _DV = range(3)
_PASSES = _DQ, _DV, _DK

# Stages of the weights and of row statistics; a flag of each warp that sums.
_WEIGHT_STAGES, _SUM_WARPS = 2, 8

# Columns of what S and dP sum over at a time. Few stages have room beside the
# rows: with wider ones, most would be in use and few on their way.
_SCORE_CHUNK, _LEAST_SCORE_STAGES = 64, 2


def runs(problem: Problem, device: Device) -> bool:
    """Whether the kernel supports the problem."""
    return (
        device.arch == "sm_90a"
        and problem.direction == "backward"
        and has_wide_heads(problem)
        and max(problem.head_dim, problem.head_dim_v) <= _MOST_HEAD_DIM
        and problem.seqlen_k > 0
        and not (problem.mask_mod is not None and is_packed(problem))
    )


def _rows_bytes(problem: Problem) -> int:
    """A QueryRows of sm90/row_stats.cuh: lse, delta, others of each row."""
    words = 2 + problem.segment_ids + has_lse_rests(problem)
    return _TILE * words * 4 + 16


def _half_stages(tile: Tile, which: int) -> int:
    """Stages of a half of what a pass sums.

    The pass of dV reads half as much for scores, and has more room.
    """
    return tile.num_stages * (2 if which == _DV else 1)


def _shared(
    problem: Problem, tile: Tile, which: int, score_stages: int
) -> int:
    d, dv = head_dims(problem)
    # full and empty: scores, halves; weights; statistics are only freed
    barriers = 2 * score_stages + 4 * _half_stages(tile, which)
    barriers += 3 * _WEIGHT_STAGES + 1
    return round_up(
        tile_bytes(_TILE, d)
        + tile_bytes(_TILE, 1 if which == _DV else dv)
        + _WEIGHT_STAGES * tile_bytes(_TILE, _TILE)
        + score_stages * tile_bytes(_TILE, _SCORE_CHUNK)
        + 2 * _half_stages(tile, which) * tile_bytes(_TILE, _PANEL_COLUMNS)
        + _WEIGHT_STAGES * _rows_bytes(problem)
        + barriers * MBARRIER_BYTES
        + 4 * _SUM_WARPS,
        1024,
    )


def _least_shared(problem: Problem, tile: Tile) -> int:
    """With the fewest stages; `_backward` uses more if they fit."""
    return _shared(problem, tile, _DQ, _LEAST_SCORE_STAGES)


def _fits(problem: Problem, tile: Tile) -> bool:
    return tile.block_q == tile.block_k == _TILE


def _scores_twice(problem: Problem, which: int) -> bool:
    """Whether a pass computes scores again for their slopes.

    In dK's, slopes beside biases and bits of kept pairs spill.
    """
    if which == _DQ:
        return scores_twice(problem)
    many = {"bends", "drops"} <= acts(problem) and problem.bias is not None
    return which == _DK and many


def _kernel(
    problem: Problem, device: Device, tile: Tile, which: int
) -> KernelPlan:
    d, dv = head_dims(problem)
    # Two visited tiles at most.
    most = 2 * (d + dv) // _SCORE_CHUNK
    stages, shared = next(
        (count, room)
        for count in range(most, _LEAST_SCORE_STAGES - 1, -1)
        if (room := _shared(problem, tile, which, count))
        <= device.shared_bytes
    )
    kernel = kernel_of(
        problem, tile, "sm90", (d, dv), shared,
        ("PASS", which),
        ("SCORE_CHUNK", _SCORE_CHUNK),
        ("KV_STAGES", stages),
        ("STAGES", _half_stages(tile, which)),
        ("DQ_SEMAPHORES", 0),
        ("INTEGER_DQ", False),
        ("OWNED_DQ", False),
        ("HEADS_INNERMOST", which != _DQ and heads_innermost(problem)),
        ("GROUP_PARTS", 1),
        ("TAIL_PARTS", 1),
        ("SCORE_BENDS", score_bends(problem)),
        ("SCORE_WARPGROUPS", 1),
        ("SCORES_TWICE", _scores_twice(problem, which)),
        ("MASK_BITS", False),
        ("DLSE", problem.dlse),
        part="_passes", ptxas_level=tile.ptxas_level,
    )  # fmt: skip
    return kernel if which == _DQ else without_sums(kernel)


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = head_dims(problem)
    rows = rows_kernel(
        problem, tile, "row_stats", d,
        ("DQ_COLUMNS", 0),
        ("DQ_SEMAPHORES", 0),
        ("PART_SEMAPHORES", 0),
        ("INTEGER_DQ", False),
        ("CAUSAL", False),
        options=("SOFTCAP", "ALIBI", "BIAS", "SCORE_MOD", "SEGMENTS"),
    )  # fmt: skip
    key_tiles_of_head = count_tiles(problem, problem.seqlen_k, _TILE)
    q_tiles, k_tiles = query_tiles(problem, _TILE), key_tiles(problem, _TILE)
    blocks = {_DQ: q_tiles, _DK: k_tiles, _DV: k_tiles}
    longest = max(problem.seqlen_q * problem.group_size, problem.seqlen_k)
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *option_launches(problem, tile, "sm90"),
            *lse_rest_launches(problem, "sm90"),
            Launch(rows, q_tiles),
            *(
                Launch(_kernel(problem, device, tile, which), blocks[which])
                for which in _PASSES
            ),
            *gradients_of_rows(problem, tile, "sm90"),
        ),
        # Of pairs of one key head: all passes share the schedule.
        heads_per_section=heads_per_section(
            problem, device, problem.num_heads_kv, longest * 2 * (d + dv)
        ),
        workspace=(
            *buffers_of_options(problem, tile, key_tiles_of_head),
            *lse_rest_buffers(problem),
            Buffer("delta", 16, q_tiles * _rows_bytes(problem) // 16),
            Buffer("tile_counter", 4, 1),
            Buffer("recompute_flags", 4, k_tiles),
        ),
    )


BACKWARD = Maker(_backward, _least_shared, _fits)
