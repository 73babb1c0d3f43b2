"""Plans of the mma.sync kernels of derivatives for 16-bit types."""

from __future__ import annotations

from cuflash.plans.tiles import Tile
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from . import expression
from .in_one import jvp_in_one
from .kernel import Device, Maker, Plan
from .rounding import round_up
from .sm80 import (
    ACCUMULATOR_REGISTERS,
    gradients,
    loads_evenly,
    loads_in_turn,
    padded,
    shares_gradients,
    shares_rows,
    shares_wide_gradients,
    warps_of_queries,
)
from .steps import (
    is_linear,
    is_wide,
    num_directions,
    padded_head_dims,
    tile_bytes,
)

# Registers, of 255, for the accumulators of two directions, which need more of
# them for statistics of rows and addresses: 192 spill.
_REGISTERS_OF_PAIRS = 160

_REGISTERS_OF_SM, _REGISTERS_OF_THREAD = 64 * 1024, 255


# The same where warps share rows, of S, O and a tangent of each; with options
# scores count twice. With 64 rows the addresses of loads spill.
_REGISTERS_OF_SHARED_ROWS, _MOST_SHARED_ROWS = 160, 32

# What a double backward of wide heads keeps, scores and sums of d2Q: the most
# that did not spill, where warps have scores of 8 keys, and of more.
_WIDE_REGISTERS = 160, 140

# The widest head of which a warp may have whole rows of O and of a tangent.
_WIDEST_ROWS = 192


def _score_parts(tile: Tile) -> int:
    """Warps that share rows, each with a part of the sums of scores."""
    return tile.num_warps // warps_of_queries(tile)


def _jvp_shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    parts = _score_parts(tile)
    tiles = (
        tile_bytes(tile.block_q, max(d, dv)),
        tile_bytes(tile.block_k, d),
        tile_bytes(tile.block_k, dv),
        4 * parts * tile.block_q * tile.block_k if parts > 1 else 0,
    )
    return (1 + tile.directions) * sum(tiles)


def _jvp_fits(problem: Problem, tile: Tile) -> bool:
    """Whether scores, O and their tangents stay in registers."""
    d, dv = padded_head_dims(problem)
    if tile.directions > num_directions(problem):
        return False
    if _score_parts(tile) > 1:
        return max(d, dv) > _WIDEST_ROWS and _shared_rows_fit(problem, tile)
    if is_wide(problem) or not shares_rows(tile):
        return False
    rows = tile.block_q // tile.num_warps
    accumulators = (1 + tile.directions) * rows * (tile.block_k + dv) // 32
    if tile.directions > 1:
        return accumulators <= _REGISTERS_OF_PAIRS
    return accumulators <= ACCUMULATOR_REGISTERS


def _shared_rows_fit(problem: Problem, tile: Tile) -> bool:
    """The same of warps that share rows, and whether they share evenly."""
    d, dv = padded_head_dims(problem)
    down, parts = warps_of_queries(tile), _score_parts(tile)
    shares = (
        tile.num_warps % down,
        tile.block_q % (down * 16),
        d % (parts * 16),
        dv % (parts * 16),
    )
    if any(shares) or not loads_evenly(tile) or tile.directions > 1:
        return False
    if tile.block_q > _MOST_SHARED_ROWS:
        return False
    rows = tile.block_q // down
    columns = tile.block_k * (2 if problem.options else 1) + dv // parts
    return 2 * rows * columns // 32 <= _REGISTERS_OF_SHARED_ROWS


def _jvp(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    return jvp_in_one(
        problem, device, tile, "sm80", (d, dv), _jvp_shared,
        ("PADDED", padded(problem, d, dv)),
        ("SCORE_WARPS_Q", warps_of_queries(tile)),
        ("SCORE_PARTS", _score_parts(tile)),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
    )  # fmt: skip


def _double_backward_head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to what halves of a warp's columns of d2Q can share.

    Four warps share 448 columns as seven blocks of 16 each, and eight cannot.
    """
    d, dv = padded_head_dims(problem)
    return 512 if d == 448 else d, 512 if dv == 448 else dv


def _double_backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _double_backward_head_dims(problem)
    keys = 2 * (tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv))
    queries = 2 * tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    weights = 3 * tile_bytes(tile.block_q, tile.block_k)
    statistics = 4 * 4 * tile.block_q  # lse, delta, b and delta_dot
    total = keys + weights + tile.num_stages * (queries + statistics)
    return round_up(total, 1024)


def _double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """Whether what is kept, and scores or sums of dq, stay in registers.

    Bent scores have two more tiles: slopes and how they move; and two more
    if arrays have gradients by these: scores before f, and their tangents.
    """
    if is_wide(problem):
        return _wide_double_backward_fits(problem, tile)
    if not shares_gradients(problem, tile):
        return False
    d, dv = padded_head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    curved = expression.tiles_of_slopes(problem)
    tiles = 4 + (curved or 2 * ("bends" in acts(problem)))
    scores = tiles * tile.block_q * tile.block_k // threads
    dq = tile.block_q * d // threads
    registers = _REGISTERS_OF_SM // (threads * tile.blocks_per_sm)
    missing = max(_REGISTERS_OF_THREAD - registers, 0)
    return kept + max(scores, dq) <= ACCUMULATOR_REGISTERS - missing


def _wide_double_backward_fits(problem: Problem, tile: Tile) -> bool:
    """The same of wide heads: d2Q is summed in two halves of its columns.

    At most as many warps have scores as there are 8 keys for. With two stages
    most tiles spill.
    """
    if tile.num_stages > 1 or not shares_wide_gradients(
        tile, _double_backward_head_dims(problem)
    ):
        return False
    d, dv = _double_backward_head_dims(problem)
    threads = tile.num_warps * 32
    kept = tile.block_k * (d + dv) // threads
    across = tile.num_warps // tile.score_warps_q
    keys = max(tile.block_k // across, 8)
    tiles = 6 if "bends" in acts(problem) else 4
    scores = tiles * tile.block_q // tile.score_warps_q * keys // 32
    dq = tile.block_q * d // threads // 2
    return kept + scores + dq <= _WIDE_REGISTERS[keys > 8]


def _double_backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return gradients(
        problem, device, tile, _double_backward_head_dims(problem),
        _double_backward_shared(problem, tile),
        ("LOADS_IN_TURN", loads_in_turn(problem, tile)),
    )  # fmt: skip


JVP = Maker(_jvp, _jvp_shared, _jvp_fits)
DOUBLE_BACKWARD = Maker(
    _double_backward, _double_backward_shared, _double_backward_fits
)
