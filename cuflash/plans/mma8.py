"""Plans of the kernels by mma.sync in steps of 8, for double and tf32x3."""

from __future__ import annotations

from cuflash.problem import Problem
from cuflash.tiles import Tile

from .kernel import Device, Family, KernelPlan, Launch, Maker, Plan
from .rounding import ceil_div, round_up
from .steps import (
    HEAD_DIM_STEP,
    ROWS_PAD,
    backward_in_one,
    element,
    element_bytes,
    heads_per_section,
)

# Where double products by tensor cores are no slower than without.
CAPABILITIES = (80, 90, 100, 103)


# Of 255: fragments and addresses need the others.
_REGISTERS = 192


def _family(problem: Problem) -> Family:
    return "dmma" if problem.dtype == "float64" else "tf32x3"


def _head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to steps that warps can share: two if there are many.

    Of float more columns are a step (`_chunk`).
    """
    dims = problem.head_dim, problem.head_dim_v
    wide = problem.dtype == "float32" and max(dims) > 128
    step = 64 if wide else HEAD_DIM_STEP
    return round_up(dims[0], step), round_up(dims[1], step)


def _chunk(problem: Problem) -> int:
    """Elements of 16 bytes: tiles of columns come by so many."""
    return 16 // element_bytes(problem)


def _forward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _head_dims(problem)
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + ROWS_PAD)
        + tile.block_k * (dv + _chunk(problem))
    )


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _head_dims(problem)
    if tile.block_q % (tile.num_warps * 16):
        return False
    rows = tile.block_q // tile.num_warps
    words = element_bytes(problem) // 4
    chunk = rows * 8 * 4 if words == 1 else 0  # sums that begin anew
    kept = words * rows * (tile.block_k + dv) + chunk
    return kept // 32 <= _REGISTERS


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _head_dims(problem)
    shared = _forward_shared(problem, tile)
    kernel = KernelPlan(
        file="forward_mma8.cu",
        entry="forward_mma8",
        constants=(
            ("Element", element(problem)),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("NUM_WARPS", tile.num_warps),
            ("BLOCKS_PER_SM", tile.blocks_per_sm),
            ("SHARED_BYTES", shared),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    num_tiles = ceil_div(problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    bytes_of_keys = problem.seqlen_k * (d + dv) * element_bytes(problem)
    return Plan(
        problem,
        _family(problem),
        tile,
        (Launch(kernel, num_tiles * pairs),),
        heads_per_section=heads_per_section(
            problem,
            device,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
        ),
    )


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _head_dims(problem)
    return element_bytes(problem) * (
        (tile.block_q + tile.block_k) * (d + dv + 2 * ROWS_PAD)
        + tile.block_q * (tile.block_k + ROWS_PAD)
        + 2 * tile.block_q  # lse and delta
    )


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _head_dims(problem)
    across = tile.num_warps // tile.score_warps_q
    gradient_across = tile.num_warps // tile.gradient_warps_k
    columns = 8 * _chunk(problem)
    shares = (
        tile.block_q % (tile.score_warps_q * 16),
        tile.block_k % (across * 8),
        d % (across * columns),
        tile.block_k % (tile.gradient_warps_k * 16),
        d % (gradient_across * columns),
        dv % (gradient_across * columns),
    )
    if any(shares):
        return False
    threads = tile.num_warps * 32
    words = element_bytes(problem) // 4
    kept = words * tile.block_k * (d + dv) // threads
    scores = 2 * words * tile.block_q * tile.block_k // threads
    dq = words * tile.block_q * d // threads
    return kept + max(scores, dq) <= _REGISTERS


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    return backward_in_one(
        problem, device, tile, _family(problem), "backward_mma8",
        _head_dims(problem), _backward_shared(problem, tile),
    )  # fmt: skip


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
