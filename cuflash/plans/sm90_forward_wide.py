"""Plans of the wgmma kernel for forward passes with large head dimensions."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .kernel import Device, Maker, Plan, shared_bytes_of_block
from .rounding import ceil_div, round_up
from .sm90 import (
    forward_plan,
    has_wide_heads,
    head_dims,
    small_bytes,
    sum_chunk,
)
from .steps import (
    is_linear,
    is_packed,
    kernel_of,
    run_tiles,
    tile_bytes,
)

_MOST_HEAD_DIM, _MOST_HEAD_DIM_V = 576, 512

_PANEL_COLUMNS = 64  # common/smem.cuh

# sm90/forward_wide_shared.cuh: stages of P; a flag of each value warp.
_P_STAGES, _VALUE_WARPS = 2, 8

# Fewer stages of K do not overlap loads with matmuls.
_LEAST_K_STAGES = 2


def runs(problem: Problem, device: Device) -> bool:
    """Whether the kernel supports the problem."""
    return (
        device.arch == "sm_90a"
        and has_wide_heads(problem)
        and problem.direction == "forward"
        and problem.head_dim <= _MOST_HEAD_DIM
        and problem.head_dim_v <= _MOST_HEAD_DIM_V
        and problem.seqlen_k > 0
        and not (problem.mask_mod is not None and is_packed(problem))
    )


def _value_columns(dv: int) -> int:
    """Columns of V in a stage of each half."""
    left = ceil_div(dv // _PANEL_COLUMNS, 2) * _PANEL_COLUMNS
    return sum(128 if x > 192 else x for x in (left, dv - left))


def _shared(problem: Problem, tile: Tile, k_stages: int) -> int:
    d, dv = head_dims(problem)
    _, is_long = run_tiles(problem, tile)
    factors = _P_STAGES * (3 if is_long else 2) * tile.block_q * 4  # of rows
    # full and empty: q; p, k, each half of v
    barriers = 2 + 2 * _P_STAGES + 2 * k_stages + 4 * tile.num_stages
    return round_up(
        tile_bytes(tile.block_q, d)
        + _P_STAGES * tile_bytes(tile.block_q, tile.block_k)
        + k_stages * tile_bytes(tile.block_k, sum_chunk(d))
        + tile.num_stages * tile_bytes(tile.block_k, _value_columns(dv))
        + factors
        + small_bytes(problem, 2, barriers)
        + 4 * _VALUE_WARPS,
        1024,
    )


def _least_shared(problem: Problem, tile: Tile) -> int:
    """With the fewest stages of K; `_forward` uses more if they fit."""
    return _shared(problem, tile, _LEAST_K_STAGES)


def _fits(problem: Problem, tile: Tile) -> bool:
    return tile.block_q == 64 and tile.num_warps == 16


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = head_dims(problem)
    most = shared_bytes_of_block(device, tile.blocks_per_sm)
    # Two key tiles at most.
    stages = range(2 * d // sum_chunk(d), _LEAST_K_STAGES - 1, -1)
    k_stages, shared = next(
        (count, room)
        for count in stages
        if (room := _shared(problem, tile, count)) <= most
    )
    kernel = kernel_of(
        problem, tile, "sm90", (d, dv), shared,
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("Q_STAGES", 1),
        ("KV_STAGES", k_stages),
        ("STAGES", tile.num_stages),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("KEY_PARTS", False),
        ("HAS_TAIL", False),
        ("MASK_BITS", False),
        run_tiles(problem, tile),
        part="_wide",
    )  # fmt: skip
    return forward_plan(problem, device, tile, kernel)


FORWARD = Maker(_forward, _least_shared, _fits)
