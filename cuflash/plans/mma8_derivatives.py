"""Plans of the mma.sync kernels with K = 8, of derivatives."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.tiles import Tile

from .kernel import Device, Launch, Maker, Plan
from .mma8 import REGISTERS, chunk, family_of, head_dims
from .steps import (
    ROWS_PAD,
    count_tiles,
    element_bytes,
    heads_per_section,
    main_kernel,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    tangent_constants,
)


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return (2 * element_bytes(problem)) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + chunk(problem))
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether S, W and the sum of O' stay in registers."""
    _, dv = head_dims(problem)
    if tile.block_q % (tile.num_warps * 16):
        return False
    rows = tile.block_q // tile.num_warps
    words = element_bytes(problem) // 4
    restarted = rows * 8 * 4 if words == 1 else 0  # sums of a chunk
    kept = words * rows * (2 * tile.block_k + dv) + restarted
    return kept // 32 <= REGISTERS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    dims = head_dims(problem)
    kernel = main_kernel(
        problem, tile, family_of(problem), dims, _jvp_shared(problem, tile),
        *option_constants(problem), *tangent_constants(problem),
    )  # fmt: skip
    blocks = count_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q * num_directions(problem)
    # k, v and their tangents
    bytes_of_keys = 2 * problem.seqlen_k * sum(dims) * element_bytes(problem)
    return Plan(
        problem,
        family_of(problem),
        tile,
        (*option_launches(problem, tile), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
        heads_per_section=heads_per_section(
            problem,
            device,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
        ),
        after_forward=True,
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
