"""Plans of the mma.sync kernels with K = 8, for float64 and tf32x3."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from . import steps
from .in_one import forward_in_one, gradients_in_one
from .kernel import Device, Maker, Plan
from .record import FamilyName
from .rounding import round_up
from .steps import (
    HEAD_DIM_STEP,
    ROWS_PAD,
    element_bytes,
    kept_and_summed,
)

# GPUs whose tensor cores are at least as fast for float64 as CUDA cores.
CAPABILITIES = (80, 90, 100, 103)

# Registers, of 255, for accumulators; fragments and addresses need the rest.
REGISTERS = 192


def family_of(problem: Problem) -> FamilyName:
    return "mma8_float64" if problem.dtype == "float64" else "mma8_float32"


def head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to multiples that warps can share.

    A float32 MMA takes more columns (`chunk`), so wide heads, which two
    warps share, need larger multiples.
    """
    dims = problem.head_dim, problem.head_dim_v
    wide = problem.dtype == "float32" and max(dims) > 128
    step = 64 if wide else HEAD_DIM_STEP
    return round_up(dims[0], step), round_up(dims[1], step)


def chunk(problem: Problem) -> int:
    """Elements per 16 bytes, the unit in which column tiles are grouped."""
    return 16 // element_bytes(problem)


def _forward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + chunk(problem))
    )


def rows_fit(problem: Problem, tile: Tile, warps: int, scores: int) -> bool:
    """Whether warps share rows, and registers hold as many scores, and O."""
    _, dv = head_dims(problem)
    if tile.block_q % (warps * 16):
        return False
    rows = tile.block_q // warps
    words = element_bytes(problem) // 4
    restarted = rows * 8 * 4 if words == 1 else 0  # sums of a chunk
    kept = words * rows * (scores * tile.block_k + dv) + restarted
    return kept // 32 <= REGISTERS


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    return rows_fit(problem, tile, tile.num_warps, 1)


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return forward_in_one(
        problem, device, tile, family_of(problem),
        head_dims(problem), _forward_shared(problem, tile),
    )  # fmt: skip


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * ROWS_PAD)
        + tile.block_q * (tile.block_k + ROWS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def shares_evenly(problem: Problem, tile: Tile, num_warps: int) -> bool:
    """Whether warps can share a backward tile, by whole MMAs."""
    columns = 8 * chunk(problem)
    dims = head_dims(problem)
    return steps.shares_evenly(tile, num_warps, dims, 16, 8, columns)


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    if not shares_evenly(problem, tile, tile.num_warps):
        return False
    d, dv = head_dims(problem)
    words = element_bytes(problem) // 4
    return kept_and_summed(tile, d, dv, words) <= REGISTERS


def gradients(
    problem: Problem, device: Device, tile: Tile, shared: int, roles: int = 1
) -> Plan:
    """The plan of a backward or a double backward; `roles` of warps."""
    return gradients_in_one(
        problem, device, tile, family_of(problem), head_dims(problem), shared,
        ("WARP_ROLES", roles), part="_roles" if roles > 1 else "",
    )  # fmt: skip


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return gradients(problem, device, tile, _backward_shared(problem, tile))


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
