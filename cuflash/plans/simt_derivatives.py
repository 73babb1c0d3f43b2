"""Plans of the simt kernels of derivatives: any dtype, head dim and GPU."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .simt import REGISTERS, fits, kernel_of, sizes
from .steps import (
    count_tiles,
    delta_buffer,
    delta_dot_buffer,
    double_delta_launch,
    gradients_of_rows,
    lse_rest_buffers,
    lse_rest_launches,
    num_directions,
    option_buffers,
    option_launches,
    tangent_constants,
)


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_q)
    return (2 * size) * (
        tile.block_q * (d + 1)
        + tile.block_k * (max(d, dv) + 1)
        + tile.block_q * (tile.block_k + 1)
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether a thread's sums of O and O' stay in registers."""
    if tile.num_warps * 32 % tile.block_q:
        return False
    size, _, dv = sizes(problem, tile, tile.block_q)
    columns = 2 * dv * tile.block_q // (tile.num_warps * 32)
    return columns * size // 4 <= REGISTERS


def recompute_launch(kernel: KernelPlan, tiles: int, device: Device) -> Launch:
    """Of a kernel of flagged tiles, almost all of which are not."""
    return Launch(kernel, min(tiles, 2 * device.num_sms))


def jvp_kernel(problem: Problem, tile: Tile, kind: str = "") -> KernelPlan:
    """The kernel of a JVP; with a `kind` of struct, of flagged rows."""
    return kernel_of(
        "simt/jvp.cu",
        "jvp_simt",
        problem,
        tile,
        tile.block_q,
        _jvp_shared(problem, tile),
        ("ONLY_FLAGGED", bool(kind)),
        *tangent_constants(problem),
        kind=kind,
    )


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    kernel = jvp_kernel(problem, tile)
    blocks = count_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q * num_directions(problem)
    return Plan(
        problem,
        "simt",
        tile,
        (*option_launches(problem, tile), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
    )


def _dkdv_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_k)
    return size * (
        tile.block_k * (2 * d + 2 * dv + 4)
        + tile.block_q * (2 * d + dv + 3)
        + 3 * tile.block_k * (tile.block_q + 1)
        + 4 * tile.block_q
    )


def _dq_shared(problem: Problem, tile: Tile) -> int:
    size, d, dv = sizes(problem, tile, tile.block_q)
    return size * (
        tile.block_k * (2 * d + 2 * dv + 4)
        + tile.block_q * (2 * d + dv + 3)
        + 2 * tile.block_q * (tile.block_k + 1)
    )


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    return max(_dkdv_shared(problem, tile), _dq_shared(problem, tile))


def double_backward_kernels(
    problem: Problem, tile: Tile, kind: str = ""
) -> tuple[KernelPlan, KernelPlan]:
    """Those of d2k and d2v, and of d2q; with a `kind`, of flagged tiles."""
    dkdv = kernel_of(
        "simt/double_backward_dkdv.cu",
        "double_backward_simt_dkdv",
        problem,
        tile,
        tile.block_k,
        _dkdv_shared(problem, tile),
        ("ONLY_FLAGGED", bool(kind)),
        *tangent_constants(problem),
        kind=kind,
    )
    dq = kernel_of(
        "simt/double_backward_dq.cu",
        "double_backward_simt_dq",
        problem,
        tile,
        tile.block_q,
        _dq_shared(problem, tile),
        ("ONLY_FLAGGED", bool(kind)),
        *tangent_constants(problem),
        kind=kind,
    )
    return dkdv, dq


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    dkdv, dq = double_backward_kernels(problem, tile)
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    return Plan(
        problem,
        "simt",
        tile,
        (
            *option_launches(problem, tile),
            *lse_rest_launches(problem),
            double_delta_launch(problem, tile.block_q),
            Launch(dkdv, k_tiles * problem.batch * problem.num_heads_kv),
            Launch(dq, q_tiles * problem.batch * problem.num_heads_q),
            *gradients_of_rows(problem, tile),
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
            delta_buffer(problem),
            delta_dot_buffer(problem),
        ),
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(_double_backward, _double_backward_shared, fits)
