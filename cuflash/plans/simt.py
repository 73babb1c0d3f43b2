"""Plans of the simt kernels: any dtype, head dimension and GPU."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from . import steps
from .kernel import Constant, Device, KernelPlan, Launch, Maker, Plan
from .record import FamilyName
from .rounding import round_up
from .steps import (
    delta_buffers,
    delta_launch,
    gradients_of_rows,
    key_tiles,
    lse_bytes,
    lse_rest_buffers,
    lse_rest_launches,
    num_directions,
    option_buffers,
    option_launches,
    query_tiles,
)


def sizes(problem: Problem, tile: Tile, rows: int) -> tuple[int, ...]:
    """Bytes of a Real, and the padded head_dim and head_dim_v.

    `rows` is the tile side that threads are assigned to (simt/simt.cuh).
    """
    step = tile.num_warps * 32 // rows
    return (
        lse_bytes(problem),
        round_up(problem.head_dim, step),
        round_up(problem.head_dim_v, step),
    )


def forward_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_q)
    return size * (
        tile.block_q * (d + 1)
        + tile.block_k * (max(d, dv) + 1)
        + tile.block_q * (tile.block_k + 1)
    )


def _dkdv_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_k)
    return size * (
        (tile.block_q + tile.block_k) * (d + dv + 2)
        + 2 * tile.block_k * (tile.block_q + 1)
        + 2 * tile.block_q
    )


def _dq_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_q)
    return size * (
        (tile.block_q + tile.block_k) * (d + dv + 2)
        + tile.block_q * (tile.block_k + 1)
    )


def _backward_shared(problem: Problem, tile: Tile) -> int:
    return max(_dkdv_shared(problem, tile), _dq_shared(problem, tile))


def fits(problem: Problem, tile: Tile) -> bool:
    """Whether a thread's accumulators stay in registers."""
    rows = max(tile.block_q, tile.block_k)
    if tile.num_warps * 32 % rows:
        return False
    size, d, dv = sizes(problem, tile, rows)
    columns = (d + dv) * rows // (tile.num_warps * 32)
    return columns * size // 4 <= REGISTERS


# Registers, half of 255, for accumulators; scores and addresses use the rest.
REGISTERS = 128


def kernel_of(
    problem: Problem, tile: Tile, rows: int, shared: int,
    *own: Constant, part: str = "", planned_by: FamilyName | None = None,
) -> KernelPlan:  # fmt: skip
    """A simt kernel; see `steps.kernel_of`, and `sizes` for `rows`."""
    _, d, dv = sizes(problem, tile, rows)
    return steps.kernel_of(
        problem, tile, "simt", (d, dv), shared,
        ("NUM_THREADS", tile.num_warps * 32), *own,
        part=part, planned_by=planned_by,
    )  # fmt: skip


def by_queries(problem: Problem, tile: Tile, kernel: KernelPlan) -> Plan:
    """A block per query tile, and per direction of a JVP."""
    blocks = query_tiles(problem, tile.block_q)
    if problem.tangents is not None:
        blocks *= num_directions(problem)
    return Plan(
        problem,
        "simt",
        tile,
        (*option_launches(problem, tile, "simt"), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
    )


def gradients(
    problem: Problem, tile: Tile, dkdv: KernelPlan, dq: KernelPlan
) -> Plan:
    """The plan of a backward or a double backward, by two kernels."""
    return Plan(
        problem,
        "simt",
        tile,
        (
            *option_launches(problem, tile, "simt"),
            *lse_rest_launches(problem, "simt"),
            delta_launch(problem, "simt", tile.block_q, 0),
            Launch(dkdv, key_tiles(problem, tile.block_k)),
            Launch(dq, query_tiles(problem, tile.block_q)),
            *gradients_of_rows(problem, tile, "simt"),
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
            *delta_buffers(problem),
        ),
    )


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = forward_shared(problem, tile)
    kernel = kernel_of(problem, tile, tile.block_q, shared)
    return by_queries(problem, tile, kernel)


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _dkdv_shared(problem, tile), _dq_shared(problem, tile)
    dkdv = kernel_of(problem, tile, tile.block_k, shared[0], part="_dkdv")
    dq = kernel_of(problem, tile, tile.block_q, shared[1], part="_dq")
    return gradients(problem, tile, dkdv, dq)


FORWARD = Maker(_forward, forward_shared, fits)
BACKWARD = Maker(_backward, _backward_shared, fits)
