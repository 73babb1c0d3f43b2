"""Plans of the simt kernels: any dtype, head dimension and GPU."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import round_up
from .steps import (
    count_tiles,
    delta_buffers,
    delta_launch,
    element,
    gradients_of_rows,
    lse_bytes,
    lse_rest_buffers,
    lse_rest_launches,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    tangent_constants,
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
    part: str = "", *own: tuple[str, bool], kind: str = "",
) -> KernelPlan:  # fmt: skip
    """A simt kernel of the problem's direction, or one `part` of it.

    With `own` constants, and the `kind` of struct.
    """
    _, d, dv = sizes(problem, tile, rows)
    return KernelPlan(
        file=f"simt/{problem.direction}{part}.cu",
        entry=f"{problem.direction}_simt{part}",
        constants=(
            ("Element", element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_THREADS", tile.num_warps * 32),
            ("SHARED_BYTES", shared),
            *option_constants(problem, kind),
            *own,
            *tangent_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
    )


def by_queries(problem: Problem, tile: Tile, kernel: KernelPlan) -> Plan:
    """A block per query tile, and per direction of a JVP."""
    blocks = count_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q
    if problem.tangents is not None:
        blocks *= num_directions(problem)
    return Plan(
        problem,
        "simt",
        tile,
        (*option_launches(problem, tile), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
    )


def gradients(
    problem: Problem, tile: Tile, dkdv: KernelPlan, dq: KernelPlan
) -> Plan:
    """The plan of a backward or a double backward, by two kernels."""
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    return Plan(
        problem,
        "simt",
        tile,
        (
            *option_launches(problem, tile),
            *lse_rest_launches(problem),
            delta_launch(problem, tile.block_q, 0),
            Launch(dkdv, k_tiles * problem.batch * problem.num_heads_kv),
            Launch(dq, q_tiles * problem.batch * problem.num_heads_q),
            *gradients_of_rows(problem, tile),
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
    dkdv = kernel_of(problem, tile, tile.block_k, shared[0], "_dkdv")
    dq = kernel_of(problem, tile, tile.block_q, shared[1], "_dq")
    return gradients(problem, tile, dkdv, dq)


FORWARD = Maker(_forward, forward_shared, fits)
BACKWARD = Maker(_backward, _backward_shared, fits)
