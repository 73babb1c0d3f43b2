"""Plans of weights, weight_sums and entropy, by any family (readouts/).

A block has a tile of fixed rows, whose pairs it streams a tile of columns at a
time: the rows of weight_sums are keys, those of the others queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem
from cuflash.request.readout import weights_shape

from . import fma, mma8, simt
from .kernel import Constant, Device, KernelPlan, Launch, Maker, Plan
from .record import FamilyName
from .rounding import ceil_div, round_up
from .sm80 import padded
from .steps import (
    ELEMENTS,
    ROWS_PAD,
    count_tiles,
    element_bytes,
    kernel_of,
    lse_bytes,
    lse_rest_buffers,
    lse_rest_launches,
    option_buffers,
    option_launches,
    padded_head_dims,
    query_tiles,
    sections,
    tile_bytes,
    without_sums,
)

# Registers, of 255, for a thread's scores, and for its fixed rows, if it keeps
# them: the rest hold fragments, sums, addresses and what options need.
_SCORES, _FIXED = 64, 64

# Of more threads than this on an SM each has 128 registers, half of them for
# both: fewer scores.
_THREADS_OF_SM = 400

# Registers of an SM; those of a thread that sm80 needs beside these.
_REGISTERS_OF_SM, _OTHERS = 64 * 1024, 40

# Blocks of weights for each SM: its key tiles are shared out among as many.
_BLOCKS_PER_SM = 8


class Shape(NamedTuple):
    """Rows and columns of a block's pairs."""

    rows: int
    columns: int


def _shape(problem: Problem, tile: Tile) -> Shape:
    if problem.direction.startswith("weight_sums"):
        return Shape(tile.block_k, tile.block_q)
    return Shape(tile.block_q, tile.block_k)


class _Pairs(NamedTuple):
    """A family's pair_tiles.cuh.

    Attributes
    ----------
    head_dim : callable
        (problem, tile) to HEAD_DIM.
    bytes_of_rows : callable
        (problem, rows, HEAD_DIM) to the bytes of a tile in shared memory.
    fits : callable
        (problem, tile, shape, HEAD_DIM) to whether threads share the pairs
        evenly, and hold theirs in registers.
    alignment : int
        Of shared memory, in bytes; 0: that of a number of lse.
    weights_pad : int
        Numbers that pad a row of weights in shared memory.
    pieces : callable
        (tile, shape) to the pieces in which columns are used.
    constants : callable
        (problem, tile) to the constants of the family alone.
    """

    head_dim: Callable[[Problem, Tile], int]
    bytes_of_rows: Callable[[Problem, int, int], int]
    fits: Callable[[Problem, Tile, Shape, int], bool]
    alignment: int
    constants: Callable[[Problem, Tile], tuple[Constant, ...]]
    weights_pad: int = 0
    pieces: Callable[[Tile, Shape], int] = lambda tile, shape: 1


def _of_warps(problem: Problem, tile: Tile) -> tuple[Constant, ...]:
    return (
        ("NUM_WARPS", tile.num_warps),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
    )


def _sm80_constants(problem: Problem, tile: Tile) -> tuple[Constant, ...]:
    is_padded = padded(problem, *padded_head_dims(problem))
    piece = _sm80_piece(tile, _shape(problem, tile))
    own = ("PADDED", is_padded), ("PIECE", piece)
    return *_of_warps(problem, tile), *own


def _sm80_piece(tile: Tile, shape: Shape) -> int:
    """Columns of a tile whose scores registers hold at once."""
    m_tiles = max(shape.rows // (tile.num_warps * 16), 1)
    many = tile.num_warps * 32 * tile.blocks_per_sm > _THREADS_OF_SM
    return min(shape.columns, 2 * _SCORES // m_tiles // (2 if many else 1))


def _sm80_fits(problem: Problem, tile: Tile, shape: Shape, d: int) -> bool:
    rows, columns = shape
    rows_at_once = tile.num_warps * 4  # of common/smem.cuh's load_tile
    if rows_at_once % 8 or rows % rows_at_once or columns % rows_at_once:
        return False
    m_tiles, rest = divmod(rows, tile.num_warps * 16)
    fixed, piece = m_tiles * d // 4, _sm80_piece(tile, shape)
    if rest or m_tiles not in (1, 2, 4) or fixed > _FIXED:
        return False
    registers = _REGISTERS_OF_SM // (tile.num_warps * 32 * tile.blocks_per_sm)
    if fixed + m_tiles * piece // 2 + _OTHERS > registers:
        return False
    return piece % 16 == 0 and columns % piece == 0


def _padded_bytes(problem: Problem, rows: int, d: int) -> int:
    return element_bytes(problem) * rows * (d + ROWS_PAD)


def _fma_fits(problem: Problem, tile: Tile, shape: Shape, d: int) -> bool:
    rows, columns = shape
    threads = tile.num_warps * 32
    return (
        rows % (tile.num_warps * fma.LANE_ROWS) == 0
        and columns % fma.LANE_COLUMNS == 0
        and rows * columns // threads <= _SCORES
    )


def _mma8_fits(problem: Problem, tile: Tile, shape: Shape, d: int) -> bool:
    rows, columns = shape
    words = element_bytes(problem) // 4
    threads = tile.num_warps * 32
    return (
        rows % (tile.num_warps * 16) == 0
        and words * rows * columns // threads <= _SCORES
    )


def _simt_fits(problem: Problem, tile: Tile, shape: Shape, d: int) -> bool:
    sharers, rest = divmod(tile.num_warps * 32, shape.rows)
    return rest == 0 and shape.columns % sharers == 0


def _simt_bytes(problem: Problem, rows: int, d: int) -> int:
    return lse_bytes(problem) * rows * (d + 1)


def _simt_head_dim(problem: Problem, tile: Tile) -> int:
    return simt.sizes(problem, tile, _shape(problem, tile).rows)[1]


_MMA8 = _Pairs(
    lambda problem, tile: mma8.head_dims(problem)[0],
    _padded_bytes, _mma8_fits, 16, _of_warps,
)  # fmt: skip
PAIRS: dict[str, _Pairs] = {
    "sm80": _Pairs(
        lambda problem, tile: padded_head_dims(problem)[0],
        lambda problem, rows, d: tile_bytes(rows, d),
        _sm80_fits, 1024, _sm80_constants,
        pieces=lambda tile, shape: shape.columns // _sm80_piece(tile, shape),
    ),
    "fma": _Pairs(
        lambda problem, tile: fma.head_dims(problem)[0],
        _padded_bytes, _fma_fits, 16, _of_warps, weights_pad=8,
    ),
    "mma8_float32": _MMA8,
    "mma8_float64": _MMA8,
    "simt": _Pairs(
        _simt_head_dim, _simt_bytes, _simt_fits, 0,
        lambda problem, tile: (("NUM_THREADS", tile.num_warps * 32),),
        weights_pad=1,
    ),
}  # fmt: skip


def shared_bytes(family: FamilyName, problem: Problem, tile: Tile) -> int:
    """Bytes of readouts/'s plans of shared memory."""
    pairs, shape = PAIRS[family], _shape(problem, tile)
    d = pairs.head_dim(problem, tile)
    of_rows, of_columns = (pairs.bytes_of_rows(problem, n, d) for n in shape)
    alignment = pairs.alignment or lse_bytes(problem)
    total = of_rows + tile.num_stages * of_columns
    if problem.direction.startswith("weight_sums"):  # lse twice, and others
        total = round_up(total, 16)
        total += tile.num_stages * tile.block_q * 3 * lse_bytes(problem)
        total += tile.num_stages * tile.block_q * 4
        alignment = max(alignment, 16)
    elif problem.direction == "weights":  # indices
        total += 4 * tile.block_q
    return round_up(total, alignment)


def maxima_launch(family: FamilyName, problem: Problem, tile: Tile) -> Launch:
    """Finds which query has each key's largest weight, for gradients."""
    kernel = _kernel(family, problem, tile, finds_query=True)
    return Launch(kernel, _blocks_of_keys(problem, tile))


def _kernel(
    family: FamilyName, problem: Problem, tile: Tile, finds_query: bool = False
) -> KernelPlan:
    pairs, asked = PAIRS[family], problem.readout
    assert asked is not None
    d = pairs.head_dim(problem, tile)
    own: tuple[Constant, ...] = ()
    name = problem.direction
    if name.startswith("weight_sums"):  # or its gradient, for maxima
        name = "weight_sums"
        own = (
            ("REDUCE_MAX", asked.reduce == "max"),
            ("ROW_WEIGHTS", asked.row_weights),
            ("CHOSEN", asked.chosen),
            ("FINDS_QUERY", finds_query),
        )
    elif name == "weights":
        own = (("Result", ELEMENTS.get(asked.dtype, asked.dtype)),)
    kernel = kernel_of(
        problem, tile, family, (d, d), shared_bytes(family, problem, tile),
        ("NUM_STAGES", tile.num_stages),
        ("DETERMINISTIC", False),  # sums of dQ, which there are not
        *pairs.constants(problem, tile), *own, name=name,
        ptxas_level=tile.ptxas_level,
    )  # fmt: skip
    return without_sums(kernel) if finds_query else kernel


def _blocks_of_keys(problem: Problem, tile: Tile) -> int:
    tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    return tiles * problem.batch * problem.num_heads_q


def _blocks(problem: Problem, device: Device, tile: Tile) -> int:
    if problem.direction == "weight_sums":
        return _blocks_of_keys(problem, tile)
    if problem.direction == "entropy":
        return query_tiles(problem, tile.block_q)
    _, heads, queries, keys = weights_shape(problem)
    rows = ceil_div(queries, tile.block_q) * problem.batch * heads
    if problem.num_sequences is not None:
        rows *= problem.num_sequences + 1
    wanted = ceil_div(_BLOCKS_PER_SM * device.num_sms, max(rows, 1))
    return rows * max(min(wanted, ceil_div(keys, tile.block_k)), 1)


def _plan(
    family: FamilyName, problem: Problem, device: Device, tile: Tile
) -> Plan:
    kernel = _kernel(family, problem, tile)
    rows, streamed = problem.seqlen_q, problem.seqlen_k
    if problem.direction == "weight_sums":
        rows, streamed = streamed, rows
    d = PAIRS[family].head_dim(problem, tile)
    buffers: tuple[Buffer, ...] = (
        *option_buffers(problem, tile),
        *lse_rest_buffers(problem),
    )
    return Plan(
        problem,
        family,
        tile,
        (
            *option_launches(problem, tile, family),
            *lse_rest_launches(problem, family),
            Launch(kernel, _blocks(problem, device, tile)),
        ),
        workspace=buffers,
        **sections(
            problem, device, kernel, problem.num_heads_q,
            streamed * d * element_bytes(problem),
            problem.batch * problem.num_heads_q,
            count_tiles(problem, rows, _shape(problem, tile).rows),
        ),
    )  # fmt: skip


def _fits(family: FamilyName, problem: Problem, tile: Tile) -> bool:
    pairs = PAIRS[family]
    d = pairs.head_dim(problem, tile)
    return pairs.fits(problem, tile, _shape(problem, tile), d)


def maker_of(family: FamilyName) -> Maker:
    """What plans a family's kernels of these directions."""
    return Maker(
        partial(_plan, family),
        partial(shared_bytes, family),
        partial(_fits, family),
    )
