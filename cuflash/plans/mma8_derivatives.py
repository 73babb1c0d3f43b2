"""Plans of the mma.sync kernels with K = 8, of derivatives."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from .in_one import jvp_in_one
from .kernel import Device, Maker, Plan
from .mma8 import (
    REGISTERS,
    chunk,
    family_of,
    gradients,
    head_dims,
    rows_fit,
    shares_evenly,
)
from .rounding import round_up
from .steps import (
    ROWS_PAD,
    element_bytes,
    is_wide,
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
    return not is_wide(problem) and rows_fit(
        problem, tile, tile.num_warps // _jvp_groups(tile), 2
    )


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    return jvp_in_one(
        problem, device, tile, family_of(problem), head_dims(problem),
        _jvp_shared, after_forward=True,
    )  # fmt: skip


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
    if is_wide(problem):
        return False
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
    shared = _double_backward_shared(problem, tile)
    return gradients(problem, device, tile, shared, roles=_warp_roles(tile))


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
