"""Plans of the mma.sync kernels of derivatives for 16-bit types."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.tiles import Tile

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .mma import ACCUMULATOR_REGISTERS, padded, shares_rows
from .steps import (
    count_tiles,
    element_bytes,
    heads_per_section,
    is_linear,
    main_kernel,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    padded_head_dims,
    tangent_constants,
    tile_bytes,
)


def _main_kernel(
    problem: Problem, tile: Tile, shared: int, *own: tuple[str, int | bool]
) -> KernelPlan:
    """The kernel of the problem's direction, with `own` constants."""
    d, dv = padded_head_dims(problem)
    return main_kernel(
        problem,
        tile,
        "mma",
        (d, dv),
        shared,
        ("PADDED", padded(problem, d, dv)),
        *own,
        *option_constants(problem),
        *tangent_constants(problem),
    )


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    return 2 * (
        tile_bytes(tile.block_q, max(d, dv))
        + tile_bytes(tile.block_k, d)
        + tile_bytes(tile.block_k, dv)
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether scores, O and their tangents stay in registers."""
    _, dv = padded_head_dims(problem)
    if not shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    return 2 * rows * (tile.block_k + dv) // 32 <= ACCUMULATOR_REGISTERS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    kernel = _main_kernel(
        problem,
        tile,
        _jvp_shared(problem, tile),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
    )
    blocks = count_tiles(problem, problem.seqlen_q, tile.block_q)
    blocks *= problem.batch * problem.num_heads_q * num_directions(problem)
    columns = 2 * sum(padded_head_dims(problem))  # of k, v, k_dot, v_dot
    bytes_of_keys = problem.seqlen_k * columns * element_bytes(problem)
    return Plan(
        problem,
        "mma",
        tile,
        (*option_launches(problem, tile), Launch(kernel, blocks)),
        workspace=option_buffers(problem, tile),
        heads_per_section=heads_per_section(
            problem,
            device,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
        ),
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
