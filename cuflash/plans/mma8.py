"""Plans of the mma.sync kernels with K = 8, for float64 and tf32x3."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem

from . import steps
from .in_one import forward_in_one, gradients_in_one
from .kernel import Constant, Device, Maker, Plan
from .record import FamilyName
from .rounding import round_up
from .steps import (
    HEAD_DIM_STEP,
    ROWS_PAD,
    element_bytes,
    is_wide,
    kept_and_summed,
)

# GPUs whose tensor cores are at least as fast for float64 as CUDA cores.
CAPABILITIES = (80, 90, 100, 103)

# Registers, of 255, for accumulators; fragments and addresses need the rest.
REGISTERS = 192

# The same of O and S, of which parts arrive, in wide rows; the warps that
# share these.
WIDE_ROWS_REGISTERS, WIDE_SCORE_PARTS = 172, 4

# Backward, more of these leave room for fewer keys, and dQ is added to more.
MOST_WIDE_QUERIES = 32


def family_of(problem: Problem) -> FamilyName:
    return "mma8_float64" if problem.dtype == "float64" else "mma8_float32"


# The widest heads of doubles that both directions have tiles for if each warp
# sums whole scores.
_MOST_WHOLE_DOUBLES = 192


def has_parts(problem: Problem) -> bool:
    """Whether warps sum parts of scores, for want of shared memory."""
    if is_wide(problem):
        return True
    widest = max(problem.head_dim, problem.head_dim_v)
    return (
        problem.dtype == "float64"
        and widest > _MOST_WHOLE_DOUBLES
        and problem.direction in ("forward", "backward")
    )


def head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to multiples that warps can share.

    A float32 MMA takes more columns (`chunk`), so heads above 128, which two
    warps share, need larger multiples. Four or eight warps share wide heads.
    """
    dims = problem.head_dim, problem.head_dim_v
    large = problem.dtype == "float32" and max(dims) > 128
    step = 64 if large else HEAD_DIM_STEP
    if has_parts(problem):
        step = 128
    return round_up(dims[0], step), round_up(dims[1], step)


def chunk(problem: Problem) -> int:
    """Elements per 16 bytes, the unit in which column tiles are grouped."""
    return 16 // element_bytes(problem)


def score_parts(problem: Problem) -> int:
    """Warps that sum the same scores, over a part of the columns each."""
    return WIDE_SCORE_PARTS if has_parts(problem) else 1


def _part_elements(problem: Problem, tile: Tile) -> int:
    """Elements of mma8/score_parts.cuh's ScoreParts."""
    parts = score_parts(problem)
    return parts * tile.block_q * tile.block_k if parts > 1 else 0


def _forward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + chunk(problem))
        + _part_elements(problem, tile)
    )


def rows_fit(problem: Problem, tile: Tile, warps: int, scores: int) -> bool:
    """Whether warps share rows, and registers hold as many scores, and O."""
    _, dv = head_dims(problem)
    if tile.block_q % (warps * 16):
        return False
    rows = tile.block_q // warps
    words = element_bytes(problem) // 4
    restarted = rows * 8 * 4 if words == 1 else 0  # sums of a chunk
    kept = words * rows * (scores * tile.block_k + dv) + restarted
    return kept // 32 <= REGISTERS


def _wide_rows_fit(problem: Problem, tile: Tile) -> bool:
    """The same of wide heads: of columns each of a row's warps has a part."""
    parts = score_parts(problem)
    down = tile.num_warps // parts
    if not down or tile.block_q % (down * 16):
        return False
    _, dv = head_dims(problem)
    rows, columns = tile.block_q // down, 3 * tile.block_k + dv // parts
    words = element_bytes(problem) // 4
    restarted = rows * 8 * 4 if words == 1 else 0
    kept = words * rows * columns + restarted
    return kept // 32 <= WIDE_ROWS_REGISTERS


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    if has_parts(problem):
        return _wide_rows_fit(problem, tile)
    if tile.block_k < 16:
        return False
    return rows_fit(problem, tile, tile.num_warps, 1)


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return forward_in_one(
        problem, device, tile, family_of(problem),
        head_dims(problem), _forward_shared(problem, tile),
        ("SCORE_PARTS", score_parts(problem)),
    )  # fmt: skip


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    if has_parts(problem):  # Q and dO load in turn
        return element_bytes(problem) * (
            tile.block_k * (d + dv + 2 * ROWS_PAD)
            + tile.block_q * (max(d, dv) + ROWS_PAD)
            + tile.block_q * (tile.block_k + ROWS_PAD)
            + 2 * tile.block_q
            + _part_elements(problem, tile)
        )
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * ROWS_PAD)
        + tile.block_q * (tile.block_k + ROWS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def shares_evenly(problem: Problem, tile: Tile, num_warps: int) -> bool:
    """Whether warps can share a backward tile, by whole MMAs."""
    columns = 8 * chunk(problem)
    dims = head_dims(problem)
    return steps.shares_evenly(tile, num_warps, dims, 16, 8, columns)


def _shares_wide_evenly(problem: Problem, tile: Tile) -> bool:
    """The same of wide heads, of whose scores warps sum parts."""
    warps, columns = tile.num_warps, 8 * chunk(problem)
    across, left = divmod(warps, tile.score_warps_q * score_parts(problem))
    if left:
        return False
    d, dv = head_dims(problem)
    gradient_across = warps // tile.gradient_warps_k
    return not any((
        tile.block_q % (tile.score_warps_q * 16),
        tile.block_k % (across * 8),
        d % (warps // tile.score_warps_q * columns),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * columns),
        dv % (gradient_across * columns),
    ))  # fmt: skip


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    if has_parts(problem) and tile.block_q > MOST_WIDE_QUERIES:
        return False
    shares = _shares_wide_evenly if has_parts(problem) else _shares_evenly
    if not shares(problem, tile):
        return False
    d, dv = head_dims(problem)
    words = element_bytes(problem) // 4
    return kept_and_summed(tile, d, dv, words) <= REGISTERS


def _shares_evenly(problem: Problem, tile: Tile) -> bool:
    return shares_evenly(problem, tile, tile.num_warps)


def gradients(
    problem: Problem, device: Device, tile: Tile, shared: int, *own: Constant,
    roles: int = 1,
) -> Plan:  # fmt: skip
    """The plan of a backward or a double backward; `roles` of warps."""
    return gradients_in_one(
        problem, device, tile, family_of(problem), head_dims(problem), shared,
        ("WARP_ROLES", roles), ("SCORE_PARTS", score_parts(problem)), *own,
        part="_roles" if roles > 1 else "",
    )  # fmt: skip


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return gradients(
        problem, device, tile, _backward_shared(problem, tile),
        ("LOADS_IN_TURN", has_parts(problem)),
    )  # fmt: skip


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
