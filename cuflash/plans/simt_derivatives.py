"""Plans of the simt kernels of derivatives: any dtype, head dim and GPU."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.tiles import Tile

from .kernel import Device, Launch, Maker, Plan
from .simt import REGISTERS, kernel_of, sizes
from .steps import (
    count_tiles,
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


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    kernel = kernel_of(
        "simt/jvp.cu",
        "jvp_simt",
        problem,
        tile,
        tile.block_q,
        _jvp_shared(problem, tile),
        *tangent_constants(problem),
    )
    blocks = count_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q * num_directions(problem)
    return Plan(
        problem,
        "simt",
        tile,
        (*option_launches(problem, tile), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
