"""Plans of the fma kernels: float32, FMA instructions on register tiles."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from . import steps
from .in_one import forward_in_one, gradients_in_one
from .kernel import Constant, Device, Maker, Plan
from .rounding import round_up
from .steps import (
    ROWS_PAD,
    is_linear,
    kept_and_summed,
)

# kernels/fma/fma.cuh: the layout of a warp's lanes over a matmul's result.
LANE_ROWS, LANE_COLUMNS = 4, 8

# kernels/fma/fma.cuh: elements that pad each row of P.
WEIGHTS_PAD = 8

# Registers, of 255, for a thread's accumulators and one operand's fragments.
REGISTERS = 200


def head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to multiples that all lanes and two warps can share."""
    d, dv = (
        round_up(d, 32 if d <= 128 else 64)
        for d in (problem.head_dim, problem.head_dim_v)
    )
    return d, dv


def _weight_keys(tile: Tile) -> int:
    """Columns of P that a warp's lanes exchange at a time."""
    return 32 if tile.block_k % 64 == 0 else 16


def _forward_shared(
    problem: Problem, tile: Tile, weight_keys: int | None = None
) -> int:
    d, dv = head_dims(problem)
    weight_keys = weight_keys or _weight_keys(tile)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + ROWS_PAD)
        + tile.block_q * (weight_keys + WEIGHTS_PAD)
    )


def rows_fit(problem: Problem, tile: Tile, kinds: int = 1) -> bool:
    """Whether lanes share rows, and registers hold those of O and S.

    `kinds`: these alone, or their tangents too.
    """
    _, dv = head_dims(problem)
    if tile.block_q % (tile.num_warps * LANE_ROWS):
        return False
    rows = tile.block_q // tile.num_warps // LANE_ROWS
    columns = (tile.block_k + dv) // LANE_COLUMNS
    return rows <= 8 and kinds * rows * (columns + 4) <= REGISTERS


def _have_room(device: Device, tile: Tile, small: int, large: int) -> bool:
    """Whether as many blocks are on an SM with more shared memory each.

    Registers hold eight warps: a lane has up to 255.
    """
    blocks = device.blocks_by_shared(small)
    return device.blocks_by_shared(large) >= min(
        blocks, max(8 // tile.num_warps, 1)
    )


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    weight_keys = _weight_keys(tile)
    if steps.adds_floats(problem):
        # All columns of P, if as many blocks have room: biases wait there.
        small = _forward_shared(problem, tile)
        large = _forward_shared(problem, tile, tile.block_k)
        if _have_room(device, tile, small, large):
            weight_keys = tile.block_k
    return forward_in_one(
        problem, device, tile, "fma",
        head_dims(problem), _forward_shared(problem, tile, weight_keys),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("WEIGHT_KEYS", weight_keys),
    )  # fmt: skip


def _backward_shared(
    problem: Problem, tile: Tile, ds_apart: bool = False
) -> int:
    d, dv = head_dims(problem)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * ROWS_PAD)
        + (1 + ds_apart) * tile.block_q * (tile.block_k + WEIGHTS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def is_small(tile: Tile) -> bool:
    """Whether a backward tile is for 64 KiB alone, as sm_75 has.

    Where a block has more, larger tiles fit, and three warps or a lane's one
    score at a time would leave multipliers idle.
    """
    return tile.num_warps == 3 or tile.block_q == 8


def shares_evenly(problem: Problem, tile: Tile) -> bool:
    """Whether all lanes get as much of each product of a backward pass."""
    return steps.shares_evenly(
        tile, tile.num_warps, head_dims(problem), LANE_ROWS, LANE_COLUMNS, 32
    )


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    if not shares_evenly(problem, tile):
        return False
    d, dv = head_dims(problem)
    rows = tile.block_q // tile.score_warps_q // LANE_ROWS
    return kept_and_summed(tile, d, dv) + 4 * rows <= REGISTERS


def gradients(
    problem: Problem, device: Device, tile: Tile, shared: int, *own: Constant
) -> Plan:
    """The plan of a backward or a double backward."""
    dims = head_dims(problem)
    return gradients_in_one(problem, device, tile, "fma", dims, shared, *own)


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    # Measured at head_dim 64 alone.
    small, large = (_backward_shared(problem, tile, x) for x in (False, True))
    apart = head_dims(problem) == (64, 64) and _have_room(
        device, tile, small, large
    )
    return gradients(
        problem, device, tile, large if apart else small, ("DS_APART", apart)
    )


FORWARD = Maker(_forward, _forward_shared, rows_fit)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
