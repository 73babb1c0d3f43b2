"""Plans of the fma kernels of derivatives: float32, register tiles."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .fma import (
    LANE_COLUMNS,
    LANE_ROWS,
    REGISTERS,
    WEIGHTS_PAD,
    head_dims,
    shares_evenly,
)
from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .steps import (
    ROWS_PAD,
    DirectionGroups,
    count_tiles,
    delta_buffer,
    delta_dot_buffer,
    double_delta_launch,
    element_bytes,
    gradient_constants,
    gradients_of_rows,
    is_linear,
    jvp_in_one,
    lse_rest_buffers,
    lse_rest_launches,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    sections,
    semaphore_buffers,
    tangent_constants,
)

# Columns of P and of P * W that a warp's lanes exchange at a time.
_WEIGHT_KEYS = 16

# Registers, of 255, for the same in a double backward, which needs more of
# them for addresses and statistics of rows.
_SECOND_REGISTERS = 176


def _kernel(
    name: str,
    problem: Problem,
    tile: Tile,
    shared: int,
    *own: tuple[str, int | bool | str],
) -> KernelPlan:
    """A kernel ``fma/<name>.cu`` with `own` constants and those of all."""
    d, dv = head_dims(problem)
    return KernelPlan(
        file=f"fma/{name}.cu",
        entry=f"{name}_fma",
        constants=(
            ("Element", "float"),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
            *own,
            *option_constants(problem),
            *tangent_constants(problem),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return (4 + 4 * tile.directions) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + ROWS_PAD)
        + tile.block_q * (_WEIGHT_KEYS + WEIGHTS_PAD)
    )


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether O, S, their tangents and a fragment stay in registers."""
    _, dv = head_dims(problem)
    if tile.directions > num_directions(problem):
        return False
    if tile.block_q % (tile.num_warps * LANE_ROWS):
        return False
    rows = tile.block_q // tile.num_warps // LANE_ROWS
    columns = (tile.block_k + dv) // LANE_COLUMNS
    return (1 + tile.directions) * rows * (columns + 4) <= REGISTERS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    def kernel_of(group: DirectionGroups) -> KernelPlan:
        return _kernel(
            "jvp",
            problem,
            tile,
            _jvp_shared(problem, replace(tile, directions=group.directions)),
            ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
            ("WEIGHT_KEYS", _WEIGHT_KEYS),
            *group.constants,
        )

    return jvp_in_one(
        problem, device, tile, "fma", head_dims(problem), kernel_of
    )


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return 4 * (
        tile.block_q * (2 * d + dv + 3 * ROWS_PAD)
        + 2 * tile.block_k * (d + dv + 2 * ROWS_PAD)
        + 2 * tile.block_q * (tile.block_k + WEIGHTS_PAD)
        + 4 * tile.block_q  # lse, delta, b and delta_dot
    )


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether d2K, d2V, four scores and two fragments are in registers."""
    d, dv = head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    scores = 4 * tile.block_q * tile.block_k // threads
    dq = (tile.block_q * d + tile.block_q * tile.block_k) // threads
    rows = tile.block_q // (tile.score_warps_q * LANE_ROWS)
    needed = kept + max(scores, dq) + 8 * rows
    return shares_evenly(problem, tile) and needed <= _SECOND_REGISTERS


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    kernel = _kernel(
        "double_backward",
        problem,
        tile,
        _double_backward_shared(problem, tile),
        *gradient_constants(problem, tile),
    )
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    pairs = problem.batch * problem.num_heads_kv
    d, dv = head_dims(problem)
    columns = 3 * d + dv  # of q, ddq, d2q and dout
    shared_by_head = (
        problem.group_size
        * problem.seqlen_q
        * columns
        * element_bytes(problem)
    )
    return Plan(
        problem,
        "fma",
        tile,
        (
            *option_launches(problem, tile),
            *lse_rest_launches(problem),
            double_delta_launch(problem, tile.block_q, adds_to_dq=True),
            Launch(kernel, k_tiles * pairs),
            *gradients_of_rows(problem, tile),
        ),
        **sections(
            problem,
            device,
            kernel,
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
            *semaphore_buffers(
                problem, q_tiles * problem.batch * problem.num_heads_q
            ),
        ),
    )


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
