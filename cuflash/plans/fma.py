"""Plans of the kernels for float32 by multiply-adds on register tiles."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.tiles import Tile

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import ceil_div, round_up
from .steps import ROWS_PAD, backward_in_one, element, heads_per_section

# kernels/fma.cuh: a warp's lanes over a product.
_LANE_ROWS, _LANE_COLUMNS = 4, 8


# The same: elements that are added to rows of P.
_WEIGHTS_PAD = 8


# What a thread's sums and one operand's fragments may fill of its 255.
_REGISTERS = 200


def _head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to steps that every lane, and two warps, can share."""
    return tuple(
        round_up(d, 32 if d <= 128 else 64)
        for d in (problem.head_dim, problem.head_dim_v)
    )


def _weight_keys(tile: Tile) -> int:
    """Columns of P that a warp's lanes exchange at a time."""
    return 32 if tile.block_k % 64 == 0 else 16


def _forward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _head_dims(problem)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + ROWS_PAD)
        + tile.block_q * (_weight_keys(tile) + _WEIGHTS_PAD)
    )


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _head_dims(problem)
    if tile.block_q % (tile.num_warps * _LANE_ROWS):
        return False
    rows = tile.block_q // tile.num_warps // _LANE_ROWS
    columns = (tile.block_k + dv) // _LANE_COLUMNS
    return rows <= 8 and rows * (columns + 4) <= _REGISTERS


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _head_dims(problem)
    shared = _forward_shared(problem, tile)
    kernel = KernelPlan(
        file="forward_fma.cu",
        entry="forward_fma",
        constants=(
            ("Element", element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("NEGATE_SCORES", problem.scale < 0),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("WEIGHT_KEYS", _weight_keys(tile)),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    num_tiles = ceil_div(problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    shared_by_head = problem.seqlen_k * (d + dv) * 4 // problem.group_size
    return Plan(
        problem,
        "fma",
        tile,
        (Launch(kernel, num_tiles * pairs),),
        heads_per_section=heads_per_section(
            problem, device, problem.num_heads_q, shared_by_head
        ),
    )


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _head_dims(problem)
    return 4 * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * ROWS_PAD)
        + tile.block_q * (tile.block_k + _WEIGHTS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _head_dims(problem)
    across = tile.num_warps // tile.score_warps_q
    gradient_across = tile.num_warps // tile.gradient_warps_k
    shares = (
        tile.block_q % (tile.score_warps_q * _LANE_ROWS),
        tile.block_k % (across * _LANE_COLUMNS),
        d % (across * 32),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * 32),
        dv % (gradient_across * 32),
    )
    if any(shares):
        return False
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    scores = 2 * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    rows = tile.block_q // tile.score_warps_q // _LANE_ROWS
    return kept + max(scores, dq) + 4 * rows <= _REGISTERS


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return backward_in_one(
        problem, device, tile, "fma", "backward_fma",
        _head_dims(problem), _backward_shared(problem, tile),
    )  # fmt: skip


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
