"""Plans of the gradients of weights, weight_sums and entropy, by any family.

Two kernels, one of which has blocks of keys, for dk, the other blocks of
queries, for dq and the gradients of rows. Both tiles are squares, so that both
have the same tile flags.
"""

from __future__ import annotations

from functools import partial

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem

from . import readouts
from .expression import keys_in_order
from .kernel import Constant, Device, KernelPlan, Launch, Maker, Plan
from .readouts import PAIRS, Shape
from .record import FamilyName
from .rounding import round_up
from .steps import (
    ELEMENTS,
    count_tiles,
    element_bytes,
    kernel_of,
    key_tiles,
    lse_bytes,
    lse_rest_buffers,
    lse_rest_launches,
    option_buffers,
    option_launches,
    query_tiles,
    sections,
    without_sums,
)

# Registers, of 255, for a thread's scores and sums; of doubles, whose
# exponential needs more.
_REGISTERS, _REGISTERS_OF_DOUBLES = 176, 112


def _finds_maxima(problem: Problem) -> bool:
    asked = problem.readout
    assert asked is not None
    is_of_sums = problem.direction == "weight_sums_backward"
    return is_of_sums and asked.reduce == "max"


def _shared_of_gradients(
    family: FamilyName, problem: Problem, tile: Tile
) -> int:
    pairs, size = PAIRS[family], tile.block_q
    d = pairs.head_dim(problem, tile)
    total = (1 + tile.num_stages) * pairs.bytes_of_rows(problem, size, d)
    total += lse_bytes(problem) * size * (size + pairs.weights_pad)
    total += 2 * 4 * size  # first choices and counts of rows
    return round_up(total, pairs.alignment or lse_bytes(problem))


def _shared(family: FamilyName, problem: Problem, tile: Tile) -> int:
    own = _shared_of_gradients(family, problem, tile)
    if not _finds_maxima(problem):
        return own
    return max(own, readouts.shared_bytes(family, problem, tile))


def _fits(family: FamilyName, problem: Problem, tile: Tile) -> bool:
    pairs, size = PAIRS[family], tile.block_q
    d = pairs.head_dim(problem, tile)
    words = lse_bytes(problem) // 4
    held = words * size * (size + d) // (tile.num_warps * 32)
    shape = Shape(size, size)
    most = _REGISTERS if words == 1 else _REGISTERS_OF_DOUBLES
    return (
        held <= most
        and pairs.fits(problem, tile, shape, d)
        and pairs.pieces(tile, shape) == 1
    )


def _kernel(
    family: FamilyName, problem: Problem, tile: Tile, of_keys: bool
) -> KernelPlan:
    pairs, asked = PAIRS[family], problem.readout
    assert asked is not None
    d = pairs.head_dim(problem, tile)
    of = problem.direction.removesuffix("_backward")
    own: tuple[Constant, ...] = (
        ("OF_KEYS", of_keys),
        ("WEIGHTS_GRADIENT", of == "weights"),
        ("SUMS_GRADIENT", of == "weight_sums"),
        ("ENTROPY_GRADIENT", of == "entropy"),
        ("Result", ELEMENTS.get(asked.dtype, asked.dtype)),
        ("REDUCE_MAX", asked.reduce == "max"),
        ("ROW_WEIGHTS", asked.row_weights),
        ("CHOSEN", asked.chosen),
        ("KEYS_IN_ORDER", keys_in_order(problem)),
    )
    kernel = kernel_of(
        problem, tile, family, (d, d),
        _shared_of_gradients(family, problem, tile),
        ("NUM_STAGES", tile.num_stages),
        ("DETERMINISTIC", False),  # sums in any order, which there are not
        *pairs.constants(problem, tile), *own,
        name="readout_gradients", ptxas_level=tile.ptxas_level,
    )  # fmt: skip
    return without_sums(kernel) if of_keys else kernel


def _plan(
    family: FamilyName, problem: Problem, device: Device, tile: Tile
) -> Plan:
    of_keys, of_queries = (
        _kernel(family, problem, tile, x) for x in (True, False)
    )
    maxima: tuple[Launch, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    if _finds_maxima(problem):
        rows = problem.batch * problem.num_heads_q
        maxima = (readouts.maxima_launch(family, problem, tile),)
        buffers = (Buffer("maxima", 4, rows * problem.seqlen_k),)
    d = PAIRS[family].head_dim(problem, tile)
    return Plan(
        problem,
        family,
        tile,
        (
            *option_launches(problem, tile, family),
            *lse_rest_launches(problem, family),
            *maxima,
            Launch(of_keys, key_tiles(problem, tile.block_k)),
            Launch(of_queries, query_tiles(problem, tile.block_q)),
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
            *buffers,
        ),
        **sections(
            problem, device, of_queries, problem.num_heads_q,
            problem.seqlen_k * d * element_bytes(problem),
            problem.batch * problem.num_heads_q,
            count_tiles(problem, problem.seqlen_q, tile.block_q),
        ),
    )  # fmt: skip


def maker_of(family: FamilyName) -> Maker:
    """What plans a family's kernels of these directions."""
    return Maker(
        partial(_plan, family),
        partial(_shared, family),
        partial(_fits, family),
    )
