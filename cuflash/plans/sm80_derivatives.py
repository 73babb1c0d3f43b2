"""Plans of the mma.sync kernels of derivatives for 16-bit types."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from . import expression
from .in_one import jvp_in_one
from .kernel import Device, Maker, Plan
from .rounding import round_up
from .sm80 import (
    ACCUMULATOR_REGISTERS,
    forward_shared,
    gradients,
    padded,
    shares_gradients,
    shares_rows,
    warps_of_queries,
)
from .steps import (
    is_linear,
    num_directions,
    padded_head_dims,
    tile_bytes,
)

# Registers, of 255, for the accumulators of two directions, which need more of
# them for statistics of rows and addresses: 192 spill.
_REGISTERS_OF_PAIRS = 160

_REGISTERS_OF_SM, _REGISTERS_OF_THREAD = 64 * 1024, 255


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    return (1 + tile.directions) * forward_shared(problem, tile)


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether scores, O and their tangents stay in registers."""
    _, dv = padded_head_dims(problem)
    if tile.directions > num_directions(problem) or not shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    accumulators = (1 + tile.directions) * rows * (tile.block_k + dv) // 32
    if tile.directions > 1:
        return accumulators <= _REGISTERS_OF_PAIRS
    return accumulators <= ACCUMULATOR_REGISTERS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    return jvp_in_one(
        problem, device, tile, "sm80", (d, dv), _jvp_shared,
        ("PADDED", padded(problem, d, dv)),
        ("SCORE_WARPS_Q", warps_of_queries(tile)),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
    )  # fmt: skip


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    keys = 2 * (tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv))
    queries = 2 * tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    weights = 3 * tile_bytes(tile.block_q, tile.block_k)
    statistics = 4 * 4 * tile.block_q  # lse, delta, b and delta_dot
    total = keys + weights + tile.num_stages * (queries + statistics)
    return round_up(total, 1024)


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether what is kept, and scores or sums of dq, stay in registers.

    Bent scores have two more tiles: slopes and how they move; and two more
    if arrays have gradients by these: scores before f, and their tangents.
    """
    if not shares_gradients(problem, tile):
        return False
    d, dv = padded_head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    curved = expression.tiles_of_slopes(problem)
    tiles = 4 + (curved or 2 * ("bends" in acts(problem)))
    scores = tiles * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    registers = _REGISTERS_OF_SM // (threads * tile.blocks_per_sm)
    missing = max(_REGISTERS_OF_THREAD - registers, 0)
    return kept + max(scores, dq) <= ACCUMULATOR_REGISTERS - missing


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _double_backward_shared(problem, tile)
    return gradients(problem, device, tile, shared)


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
