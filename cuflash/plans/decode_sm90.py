"""Plans of the decode kernel of warpgroup MMAs: more rows, on Hopper."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from . import decode, decode_latent
from .kernel import Device, Maker, Plan
from .rounding import round_up
from .steps import is_linear, kernel_of, tile_bytes

# The head dimensions that common/ptx.cuh has MMAs for.
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# Accumulators of a thread (S, P and O) that fit beside what options need.
_MOST_ACCUMULATORS = 176

_PRODUCER_WARPS = 4

# Rows up to which decode/forward.cu reads keys at the speed of memory.
_FEWEST_ROWS = 65


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all, on sm_90a."""
    if decode_latent.runs(problem):
        return True
    return decode.runs(problem) and not decode.is_float8(problem)


def has_rows(problem: Problem) -> bool:
    """Whether a key head has more rows than decode/forward.cu is fast for."""
    if decode_latent.runs(problem):  # its head dimensions are too large
        return True
    return decode.rows_of_head(problem) >= _FEWEST_ROWS


def pays(problem: Problem, device: Device) -> bool:
    """Whether it is faster than the other kernels."""
    return (
        problem.block_q is problem.block_k is None
        and has_rows(problem)
        and decode.rows_of_head(problem) <= 1024
        and problem.seqlen_k >= 512
    )


def _head_dims(problem: Problem) -> tuple[int, int]:
    d, dv = (
        next(x for x in _HEAD_DIMS if x >= d)
        for d in (problem.head_dim, problem.head_dim_v)
    )
    return d, dv


def _shared(problem: Problem, tile: Tile) -> int:
    """Bytes of decode/sm90_shared.cuh's SharedPlan."""
    d, dv = _head_dims(problem)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    stage = keys + 4 * 8 + 4 * _PRODUCER_WARPS  # barriers; `replaced`
    queries = tile_bytes(tile.block_q, d)
    return round_up(queries + tile.num_stages * stage, 1024)


def _fits(problem: Problem, tile: Tile) -> bool:
    """Whether a tile has as many rows, and fits in registers.

    It does not depend on the batch, so that with num_splits a sequence's
    bits do not.
    """
    _, dv = _head_dims(problem)
    rows = 64 if decode.rows_of_head(problem) <= 64 else 128
    used = tile.block_k * 3 // 4 + dv // 2
    most = _MOST_ACCUMULATORS if tile.blocks_per_sm == 1 else 150
    warps = (tile.block_q // 64 + 1) * 4
    return tile.block_q == rows and tile.num_warps == warps and used <= most


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _shared(problem, tile)
    main = kernel_of(
        problem, tile, "decode", _head_dims(problem), shared,
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("KV_STAGES", tile.num_stages),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("BALANCED", decode.is_balanced(problem)),
        *decode.cache_constants(problem),
        part="_sm90",
    )  # fmt: skip
    main = replace(main, entry="forward_decode_sm90")
    return decode.split_plan(
        problem, device, "decode_sm90", tile, main, tile.blocks_per_sm,
        key_warps=1,
    )  # fmt: skip


FORWARD = Maker(_forward, _shared, _fits)
