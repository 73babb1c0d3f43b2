"""Plans of the mma.sync kernels with K = 8, of derivatives."""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .kernel import Device, Launch, Maker, Plan
from .mma8 import REGISTERS, chunk, family_of, head_dims, shares_evenly
from .rounding import round_up
from .steps import (
    ROWS_PAD,
    count_tiles,
    delta_buffer,
    delta_dot_buffer,
    double_delta_launch,
    element_bytes,
    gradient_constants,
    gradients_of_rows,
    lse_rest_buffers,
    lse_rest_launches,
    main_kernel,
    num_directions,
    option_buffers,
    option_constants,
    option_launches,
    sections,
    semaphore_buffers,
    tangent_constants,
)


def _jvp_groups(tile: Tile) -> int:
    """Groups of warps that take turns at the key tiles.

    Two where there are twice as many warps as 16-row tiles of queries.
    """
    return 2 if tile.num_warps * 16 == 2 * tile.block_q else 1


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    queries = tile.block_q * (d + ROWS_PAD)
    keys = tile.block_k * (d + ROWS_PAD)
    values = tile.block_k * (dv + chunk(problem))
    size = 2 * element_bytes(problem)  # what moves, and its tangent
    if _jvp_groups(tile) == 1:
        return size * (queries + keys + values)
    votes = round_up(tile.num_warps // 2 * 4, 16)
    return size * queries + 2 * (size * max(keys, values) + votes)


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether S, W and the sum of O' stay in registers."""
    _, dv = head_dims(problem)
    warps = tile.num_warps // _jvp_groups(tile)
    if tile.block_q % (warps * 16):
        return False
    rows = tile.block_q // warps
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
    tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q * num_directions(problem)
    # k, v and their tangents
    bytes_of_keys = 2 * problem.seqlen_k * sum(dims) * element_bytes(problem)
    return Plan(
        problem,
        family_of(problem),
        tile,
        (
            *option_launches(problem, tile),
            *lse_rest_launches(problem),
            Launch(kernel, tiles * pairs),
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
        ),
        **sections(
            problem,
            device,
            kernel,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
            pairs,
            tiles,
        ),
        after_forward=True,
    )


def _warp_roles(tile: Tile) -> int:
    """2 for mma8/double_backward_roles.cu, which has two stages.

    Half of its warps compute scores, half gradients.
    """
    return tile.num_stages


def _roles_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    stage = tile.block_q * (
        2 * d + dv + 3 * ROWS_PAD
        + 3 * (tile.block_k + ROWS_PAD)
        + 4  # numbers of a row
    )  # fmt: skip
    keys = 2 * tile.block_k * (d + ROWS_PAD)
    flags = round_up(4 * _role_warps(tile), 16)
    return element_bytes(problem) * (keys + 2 * stage) + flags


def _role_warps(tile: Tile) -> int:
    return tile.num_warps // _warp_roles(tile)


def _roles_fit(problem: Problem, tile: Tile) -> bool:
    """Whether registers hold what either role has.

    V, ddV and scores of the score warps; d2K, d2V and d2Q of the others.
    """
    d, dv = head_dims(problem)
    across = _role_warps(tile) // tile.score_warps_q
    pairs = tile.block_q * tile.block_k
    values = 2 * tile.block_k // across * dv // 32
    scores = values + 4 * pairs // (32 * _role_warps(tile))
    gradients = tile.block_k * (d + dv) + tile.block_q * d
    elements = max(scores, gradients // (32 * _role_warps(tile)))
    return 2 * elements <= REGISTERS


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    if _warp_roles(tile) == 2:
        return _roles_shared(problem, tile)
    d, dv = head_dims(problem)
    return element_bytes(problem) * (
        2 * tile.block_k * (d + dv + 2 * ROWS_PAD)
        + tile.block_q * (2 * d + dv + 3 * ROWS_PAD)
        + 2 * tile.block_q * (tile.block_k + ROWS_PAD)
        + 4 * tile.block_q  # numbers of a row
    )


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether d2K, d2V, and scores or d2Q and dS, stay in registers."""
    if not shares_evenly(problem, tile, _role_warps(tile)):
        return False
    if _warp_roles(tile) == 2:
        return _roles_fit(problem, tile)
    d, dv = head_dims(problem)
    pairs = tile.block_q * tile.block_k
    elements = tile.block_k * (d + dv) + max(
        4 * pairs, pairs + tile.block_q * d
    )
    words = element_bytes(problem) // 4
    return words * elements // (tile.num_warps * 32) <= REGISTERS


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = dims = head_dims(problem)
    kernel = main_kernel(
        problem, tile, family_of(problem), dims,
        _double_backward_shared(problem, tile),
        *gradient_constants(problem, tile), *option_constants(problem),
        *tangent_constants(problem), ("WARP_ROLES", _warp_roles(tile)),
    )  # fmt: skip
    if _warp_roles(tile) == 2:
        kernel = replace(
            kernel,
            file="mma8/double_backward_roles.cu",
            entry="double_backward_roles",
        )
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    pairs = problem.batch * problem.num_heads_kv
    columns = 3 * d + dv  # of q, its cotangent, d2q and dout
    bytes_of_rows = problem.seqlen_q * columns * element_bytes(problem)
    return Plan(
        problem,
        family_of(problem),
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
            problem.group_size * bytes_of_rows,
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
