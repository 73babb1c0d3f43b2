"""Plans of the kernel of latent attention: values are columns of keys."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.request.problem import ALIGNMENT, Problem

from . import decode
from .kernel import Device, Maker, Plan
from .rounding import round_up
from .steps import (
    element_bytes,
    is_linear,
    is_wide,
    kernel_of,
    tile_bytes,
)

_PANEL_COLUMNS = 64  # common/smem.cuh

_MOST_HEAD_DIM, _MOST_HEAD_DIM_V = 576, 512

# decode/latent_shared.cuh: a RowFactors has three floats of each row; bytes of
# a Work and the number of them.
_ROW_NUMBERS, _WORK_BYTES, _WORKS = 3, 64, 2

# As if so many warps shared a part's keys: parts of up to 131,072 keys, as the
# runs of other wide heads (steps.run_tiles).
_KEY_WARPS = 4


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all, on sm_90a."""
    cache = problem.kvcache
    return (
        cache is not None
        and cache.latent
        and cache.alignment == ALIGNMENT
        and not decode.is_float8(problem)
        and element_bytes(problem) == 2
        and is_wide(problem)
        and problem.head_dim <= _MOST_HEAD_DIM
        and problem.head_dim_v <= _MOST_HEAD_DIM_V
    )


def _head_dims(problem: Problem) -> tuple[int, int]:
    """Whole panels, at least one for each half of O's columns."""
    return (
        round_up(problem.head_dim, _PANEL_COLUMNS),
        max(round_up(problem.head_dim_v, _PANEL_COLUMNS), 2 * _PANEL_COLUMNS),
    )


def _shared(problem: Problem, tile: Tile) -> int:
    """Bytes of decode/latent_shared.cuh's SharedPlan."""
    d, dv = _head_dims(problem)
    keys = tile_bytes(tile.block_k, d)
    if d == dv:  # no panel is free for P
        keys += tile_bytes(tile.block_q, tile.block_k)
    factors = _ROW_NUMBERS * 4 * tile.block_q
    barriers = 2 * d // _PANEL_COLUMNS + 1  # full, empty; p_full
    return round_up(
        tile_bytes(tile.block_q, d)
        + tile.num_stages * (keys + factors + 8 * barriers)
        + _WORKS * (2 * 8 + _WORK_BYTES),
        1024,
    )


def _fits(problem: Problem, tile: Tile) -> bool:
    return tile.num_warps == 16 and tile.blocks_per_sm == 1


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    main = kernel_of(
        problem, tile, "decode", _head_dims(problem), _shared(problem, tile),
        ("BLOCKS_PER_SM", 1),
        ("KV_STAGES", tile.num_stages),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        *decode.parts_constants(problem, tile),
        *decode.cache_constants(problem),
        part="_latent",
    )  # fmt: skip
    splits = decode.num_splits(
        problem, device, replace(tile, num_warps=_KEY_WARPS), 1
    )
    return decode.split_plan(
        problem, device, "decode_sm90", tile, main, 1, splits
    )


FORWARD = Maker(_forward, _shared, _fits)
