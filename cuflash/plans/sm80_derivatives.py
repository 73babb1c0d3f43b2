"""Plans of the mma.sync kernels of derivatives for 16-bit types."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans import workspace
from cuflash.plans.tiles import Tile
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import round_up
from .sm80 import (
    ACCUMULATOR_REGISTERS,
    padded,
    shares_gradients,
    shares_rows,
)
from .steps import (
    DirectionGroups,
    count_tiles,
    delta_buffer,
    delta_dot_buffer,
    double_delta_launch,
    gradient_constants,
    gradients_of_rows,
    is_linear,
    jvp_in_one,
    lse_rest_buffers,
    lse_rest_launches,
    main_kernel,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    padded_head_dims,
    rounding_launch,
    sections,
    semaphore_buffers,
    tangent_constants,
    tile_bytes,
)

# Registers, of 255, for the accumulators of two directions, which need more of
# them for statistics of rows and addresses: 192 spill.
_REGISTERS_OF_PAIRS = 160

_REGISTERS_OF_SM, _REGISTERS_OF_THREAD = 64 * 1024, 255


def _main_kernel(
    problem: Problem, tile: Tile, shared: int, *own: tuple[str, int | bool]
) -> KernelPlan:
    """The kernel of the problem's direction, with `own` constants."""
    d, dv = padded_head_dims(problem)
    return main_kernel(
        problem,
        tile,
        "sm80",
        (d, dv),
        shared,
        ("PADDED", padded(problem, d, dv)),
        *own,
        *option_constants(problem),
        *tangent_constants(problem),
    )


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    return (1 + tile.directions) * (
        tile_bytes(tile.block_q, max(d, dv))
        + tile_bytes(tile.block_k, d)
        + tile_bytes(tile.block_k, dv)
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether scores, O and their tangents stay in registers."""
    _, dv = padded_head_dims(problem)
    if tile.directions > num_directions(problem) or not shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    accumulators = (1 + tile.directions) * rows * (tile.block_k + dv) // 32
    if tile.directions > 1:
        return accumulators <= _REGISTERS_OF_PAIRS
    return accumulators <= ACCUMULATOR_REGISTERS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    def kernel_of(group: DirectionGroups) -> KernelPlan:
        return _main_kernel(
            problem,
            tile,
            _jvp_shared(problem, replace(tile, directions=group.directions)),
            ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
            *group.constants,
        )

    return jvp_in_one(
        problem, device, tile, "sm80", padded_head_dims(problem), kernel_of
    )


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    keys = 2 * (tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv))
    queries = 2 * tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    weights = 3 * tile_bytes(tile.block_q, tile.block_k)
    statistics = 4 * 4 * tile.block_q  # lse, delta, b and delta_dot
    total = keys + weights + tile.num_stages * (queries + statistics)
    return round_up(total, 1024)


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether what is kept, and scores or sums of dq, stay in registers.

    Bent scores have two more tiles: slopes and curvatures.
    """
    if not shares_gradients(problem, tile):
        return False
    d, dv = padded_head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    tiles = 6 if "bends" in acts(problem) else 4
    scores = tiles * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    registers = _REGISTERS_OF_SM // (threads * tile.blocks_per_sm)
    missing = max(_REGISTERS_OF_THREAD - registers, 0)
    return kept + max(scores, dq) <= ACCUMULATOR_REGISTERS - missing


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    main = _main_kernel(
        problem,
        tile,
        _double_backward_shared(problem, tile),
        ("NUM_STAGES", tile.num_stages),
        *gradient_constants(problem, tile),
    )
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    pairs = problem.batch * problem.num_heads_kv
    q_pairs = problem.batch * problem.num_heads_q
    # q, its cotangent and dout have 2 bytes per element, the sums of dq 4.
    shared_by_head = problem.group_size * problem.seqlen_q * (8 * d + 2 * dv)
    return Plan(
        problem,
        "sm80",
        tile,
        (
            *option_launches(problem, tile),
            *lse_rest_launches(problem),
            double_delta_launch(problem, tile.block_q, d),
            Launch(main, k_tiles * pairs),
            rounding_launch(
                problem, tile, (d, dv), q_tiles * q_pairs, tile.num_warps
            ),
            *gradients_of_rows(problem, tile),
        ),
        **sections(
            problem,
            device,
            main,
            problem.num_heads_kv,
            shared_by_head,
            pairs,
            k_tiles,
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
            delta_buffer(problem),
            delta_dot_buffer(problem),
            workspace.dq_sum(q_tiles * tile.block_q * d * q_pairs),
            *semaphore_buffers(problem, q_tiles * q_pairs),
        ),
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
