"""Plans of the mma.sync kernels for 16-bit types."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from .in_one import forward_in_one, gradients_in_one
from .kernel import Constant, Device, Maker, Plan
from .rounding import round_up
from .steps import (
    is_linear,
    is_wide,
    kept_and_summed,
    longest_run,
    padded_head_dims,
    run_tiles,
    shares_evenly,
    tile_bytes,
)

# Registers, of 255, for a thread's accumulators. The rest hold fragments,
# addresses and row statistics. 224 is the most that fits, as measured.
ACCUMULATOR_REGISTERS = 224

# The same of heads wider than 256, whose warps share rows.
WIDE_FORWARD_REGISTERS, WIDE_BACKWARD_REGISTERS = 176, 200

# Beside scores, for what options know of a pair.
_REGISTERS_OF_OPTIONS = 24


def forward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    return (
        _exchange_bytes(tile)
        + tile_bytes(tile.block_q, max(d, dv))
        + tile_bytes(tile.block_k, d)
        + tile_bytes(tile.block_k, dv)
    )


def _exchange_bytes(tile: Tile) -> int:
    """Bytes of sm80/row_exchange.cuh."""
    across = tile.num_warps // warps_of_queries(tile)
    if across == 1:
        return 0
    weights = 2 * tile.block_q * tile.block_k
    return round_up(weights + 4 * across * tile.block_q, 1024)


def shares_rows(tile: Tile) -> bool:
    """Whether warps share rows in 16-row tiles, and loads are even.

    In common/smem.cuh's load_tile, eight threads load a row, and a thread's
    rows are multiples of 8 apart.
    """
    rows_at_once = tile.num_warps * 4
    return not (
        tile.block_q % (tile.num_warps * 16)
        or rows_at_once % 8
        or tile.block_q % rows_at_once
        or tile.block_k % rows_at_once
    )


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    if (tile.score_warps_q > 1) != is_wide(problem):
        return False
    _, dv = padded_head_dims(problem)
    if is_wide(problem):
        return _wide_forward_fits(tile, dv)
    if not shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    return rows * (tile.block_k + dv) // 32 <= ACCUMULATOR_REGISTERS


def _wide_forward_fits(tile: Tile, dv: int) -> bool:
    """Whether warps share rows, keys and columns, and registers hold them."""
    down, across = tile.score_warps_q, tile.num_warps // tile.score_warps_q
    shares = (
        tile.block_q % (down * 16),
        tile.block_k % 16,
        tile.block_k % (across * 8),
        dv % (across * 16),
    )
    if any(shares) or not loads_evenly(tile):
        return False
    rows, columns = tile.block_q // down, (tile.block_k + dv) // across
    return rows * columns // 32 <= WIDE_FORWARD_REGISTERS


def loads_evenly(tile: Tile) -> bool:
    """Whether threads share loads evenly: common/smem.cuh's LoadShare."""
    at_once = tile.num_warps * 4
    return all(
        rows % 8 == 0 and max(rows, at_once) % min(rows, at_once) == 0
        for rows in (tile.block_q, tile.block_k)
    )


def padded(problem: Problem, d: int, dv: int) -> bool:
    return (problem.head_dim, problem.head_dim_v) != (d, dv)


def warps_of_queries(tile: Tile) -> int:
    """Warps along the queries; in tiles for narrow heads, all of them.

    Of few queries, one.
    """
    if tile.score_warps_q > 1:
        return tile.score_warps_q
    return min(tile.num_warps, tile.block_q // 16)


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    return forward_in_one(
        problem, device, tile, "sm80", (d, dv), forward_shared(problem, tile),
        ("PADDED", padded(problem, d, dv)),
        ("SCORE_WARPS_Q", warps_of_queries(tile)),
        ("SCORE_PARTS", 1),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        run_tiles(problem, tile, longest_run(device)),
    )  # fmt: skip


def _ds_column(tile: Tile) -> int:
    """Where dS begins in P's tile; 0: it has one of its own.

    In one tile where queries are few because shared memory is.
    """
    few = tile.block_q < 32 and tile.block_k <= 32
    return 32 if few else 0


# Heads with more columns may have tiles of 16 queries, as wide ones have: with
# 64 KiB of shared memory they have no other.
_FEW_QUERIES_ABOVE = 192


def _has_few_queries(problem: Problem, tile: Tile) -> bool:
    widest = max(problem.head_dim, problem.head_dim_v)
    return tile.block_q < 32 and widest > _FEW_QUERIES_ABOVE


def _backward_head_dims(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Of few queries rounded up to what four warps can share."""
    d, dv = padded_head_dims(problem)
    step = 64 if _has_few_queries(problem, tile) else 1
    return round_up(d, step), round_up(dv, step)


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _backward_head_dims(problem, tile)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    queries = tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    beside = _ds_column(tile)
    scores = (1 if beside else 2) * tile_bytes(
        tile.block_q, beside + tile.block_k
    )
    statistics = 2 * 4 * tile.block_q  # lse and delta
    total = keys + scores + tile.num_stages * (queries + statistics)
    return round_up(total, 1024)


def shares_gradients(problem: Problem, tile: Tile) -> bool:
    """Whether warps share the matmuls of a backward pass, and loads."""
    rows_at_once = tile.num_warps * 4
    if tile.block_q % rows_at_once or tile.block_k % rows_at_once:
        return False
    dims = padded_head_dims(problem)
    return shares_evenly(tile, tile.num_warps, dims, 16, 16, 16)


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    if is_wide(problem) or _has_few_queries(problem, tile):
        return _wide_backward_fits(problem, tile)
    if not shares_gradients(problem, tile):
        return False
    d, dv = padded_head_dims(problem)
    return kept_and_summed(tile, d, dv) <= ACCUMULATOR_REGISTERS


def shares_wide_gradients(tile: Tile, head_dims: tuple[int, int]) -> bool:
    """Whether warps share those of wide heads, and loads.

    Some warps have no scores if keys are few.
    """
    d, dv = head_dims
    warps = tile.num_warps
    across = warps // tile.score_warps_q
    gradient_across = warps // tile.gradient_warps_k
    shares = (
        tile.block_q % (tile.score_warps_q * 16),
        tile.block_k % (min(across, tile.block_k // 8) * 8),
        d % (across * 16),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * 16),
        dv % (gradient_across * 16),
    )
    return not any(shares) and loads_evenly(tile)


def _wide_backward_fits(problem: Problem, tile: Tile) -> bool:
    """The same of wide heads: dQ is summed in two halves of its columns."""
    d, dv = _backward_head_dims(problem, tile)
    if not shares_wide_gradients(tile, (d, dv)):
        return False
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    tiles = 4 if "bends" in acts(problem) else 2  # slopes of scores, too
    scores = tiles * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads // 2
    spare = _REGISTERS_OF_OPTIONS if problem.options else 0
    return kept + max(scores + spare, dq) <= WIDE_BACKWARD_REGISTERS


def gradients(
    problem: Problem, device: Device, tile: Tile, head_dims: tuple[int, int],
    shared: int, *own: Constant,
) -> Plan:  # fmt: skip
    """The plan of a backward or a double backward."""
    d, dv = head_dims
    return gradients_in_one(
        problem, device, tile, "sm80", (d, dv), shared,
        ("PADDED", padded(problem, d, dv)),
        ("NUM_STAGES", tile.num_stages),
        ("DS_COLUMN", _ds_column(tile)),
        *own,
    )  # fmt: skip


def loads_in_turn(problem: Problem, tile: Tile) -> bool:
    """Whether dO and Q load one after the other, where both wait."""
    return is_wide(problem) and tile.num_stages == 1


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return gradients(
        problem, device, tile, _backward_head_dims(problem, tile),
        _backward_shared(problem, tile),
        ("LOADS_IN_TURN", loads_in_turn(problem, tile)),
    )  # fmt: skip


FORWARD = Maker(_forward, forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
