"""Plans of the fma kernels of derivatives: float32, register tiles."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .fma import (
    LANE_ROWS,
    WEIGHTS_PAD,
    gradients,
    head_dims,
    rows_fit,
    shares_evenly,
)
from .in_one import jvp_in_one
from .kernel import Device, Maker, Plan
from .steps import (
    ROWS_PAD,
    is_linear,
    num_directions,
)

# Columns of P and of P * W that a warp's lanes exchange at a time.
_WEIGHT_KEYS = 16

# Registers, of 255, for the same in a double backward, which needs more of
# them for addresses and statistics of rows.
_SECOND_REGISTERS = 176


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return (4 + 4 * tile.directions) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + ROWS_PAD)
        + tile.block_q * (_WEIGHT_KEYS + WEIGHTS_PAD)
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether O, S, their tangents and a fragment stay in registers."""
    return tile.directions <= num_directions(problem) and rows_fit(
        problem, tile, 1 + tile.directions
    )


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    return jvp_in_one(
        problem, device, tile, "fma", head_dims(problem), _jvp_shared,
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("WEIGHT_KEYS", _WEIGHT_KEYS),
    )  # fmt: skip


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return 4 * (
        tile.block_q * (2 * d + dv + 3 * ROWS_PAD)
        + 2 * tile.block_k * (d + dv + 2 * ROWS_PAD)
        + 2 * tile.block_q * (tile.block_k + WEIGHTS_PAD)
        + 4 * tile.block_q  # lse, delta, b and delta_dot
    )


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether d2K, d2V, four scores and two fragments are in registers."""
    d, dv = head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    scores = 4 * tile.block_q * tile.block_k // threads
    dq = (tile.block_q * d + tile.block_q * tile.block_k) // threads
    rows = tile.block_q // (tile.score_warps_q * LANE_ROWS)
    needed = kept + max(scores, dq) + 8 * rows
    return shares_evenly(problem, tile) and needed <= _SECOND_REGISTERS


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _double_backward_shared(problem, tile)
    return gradients(problem, device, tile, shared)


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
