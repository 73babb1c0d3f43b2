"""Plans of the decode kernel: few queries, many keys, 16-bit types."""

from __future__ import annotations

from cuflash import workspace
from cuflash.problem import MAX_SPLITS, Problem
from cuflash.tiles import Tile
from cuflash.workspace import Buffer

from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import ceil_div, round_up
from .steps import (
    MAX_OF_TENSOR_CORES,
    arguments,
    element,
    is_linear,
    is_packed,
    main_kernel,
    num_rows,
    option_constants,
    padded_head_dims,
    tile_bytes,
)

_WARP_KEYS = 16  # decode/rows.cuh: a warp's keys of a tile

# Rows of (query, head of a group) pairs up to which keys are read once or
# twice. With more, the other kernels' tiles are full.
_MOST_ROWS = 64

_MANY_HEADS = 256  # more than two blocks for each SM of any GPU

_MERGE_THREADS = 128

# Below it, a call takes as long as its launch, whatever the kernel.
_FEWEST_KEYS = 512


def _rows(problem: Problem) -> int:
    """The rows of a key head: each query, for each query head of the group."""
    return problem.seqlen_q * problem.group_size


def _heads(problem: Problem, block_q: int) -> int:
    """The row tiles of all key heads, each of which reads a head's keys."""
    row_tiles = ceil_div(_rows(problem), block_q)
    return problem.batch * problem.num_heads_kv * row_tiles


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all."""
    return (
        problem.direction == "forward"
        and problem.dtype in ("float16", "bfloat16")
        and not is_packed(problem)
        and max(problem.head_dim, problem.head_dim_v) <= MAX_OF_TENSOR_CORES
    )


def pays(problem: Problem) -> bool:
    """Whether it is faster than the kernels for many queries."""
    return problem.block_q is problem.block_k is None and (
        problem.num_splits is not None or _is_short(problem)
    )


def _is_short(problem: Problem) -> bool:
    """Whether its queries do not fill the tiles of the other kernels."""
    return _rows(problem) <= _MOST_ROWS and problem.seqlen_k >= _FEWEST_KEYS


def _shared(problem: Problem, tile: Tile) -> int:
    d, dv = padded_head_dims(problem)
    stage = tile_bytes(_WARP_KEYS, d) + tile_bytes(_WARP_KEYS, dv)
    loads = tile_bytes(tile.block_q, d)
    loads += tile.num_warps * tile.num_stages * stage
    states = 4 * tile.num_warps * tile.block_q * (2 + dv)
    return round_up(max(loads, states), 1024)


def _fits(problem: Problem, tile: Tile) -> bool:
    """Whether it is a tile that is fast for as many heads and rows.

    With num_splits it does not depend on the batch, so that a sequence's
    bits do not. 32 rows of more than 128 columns do not fit in a thread's
    registers. Two blocks of four warps on an SM overlap their ends; one of
    eight needs half as many parts of the keys. On an H200 128 x 2,048 keys
    take 252 us with four warps and 264 with eight, 1 x 8,192 keys 15.3 and
    14.4, 16 x 8,192 keys 130 and 125.
    """
    _, dv = padded_head_dims(problem)
    rows = 16 if _rows(problem) <= 16 or dv > 128 else 32
    few_heads = problem.num_splits or _heads(problem, rows) < _MANY_HEADS
    return tile.block_q == rows and bool(tile.num_warps == 4 or few_heads)


def num_splits(
    problem: Problem, device: Device, tile: Tile, shared: int
) -> int:
    """Into how many parts the keys of a head are cut.

    The blocks that run at once read at the same rate, so the time is the
    number of waves times the tiles of a part, plus what a part costs at its
    ends, about two tiles.
    """
    heads = _heads(problem, tile.block_q)
    tiles = max(ceil_div(problem.seqlen_k, tile.block_k), 1)
    if problem.num_splits:
        return min(problem.num_splits, tiles)
    resident = device.num_sms * max(device.shared_bytes // (shared + 1024), 1)

    def cost(splits: int) -> tuple[int, int]:
        waves = ceil_div(heads * splits, resident)
        return waves * (ceil_div(tiles, splits) + 2), splits

    most = min(tiles, MAX_SPLITS)
    return min(range(1, most + 1), key=cost)


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    shared = _shared(problem, tile)
    splits = num_splits(problem, device, tile, shared)
    main = main_kernel(
        problem, tile, "decode", (d, dv), shared,
        ("NUM_STAGES", tile.num_stages),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("SPLIT", splits > 1),
        *option_constants(problem, "Split"),
    )  # fmt: skip
    blocks = _heads(problem, tile.block_q) * splits
    launches: tuple[Launch, ...] = (Launch(main, blocks),)
    buffers: tuple[Buffer, ...] = ()
    if splits > 1:
        merge = KernelPlan(
            file="finish/merge_splits.cu",
            entry="merge_splits",
            constants=(
                ("Element", element(problem)),
                ("NUM_THREADS", _MERGE_THREADS),
                ("MAX_SPLITS", MAX_SPLITS),
                ("SHARED_BYTES", 4 * MAX_SPLITS),
                ("SINK", problem.sink),
                ("PACKED", False),
                arguments(problem, "Split"),
            ),
            threads=_MERGE_THREADS,
            shared_bytes=4 * MAX_SPLITS,
        )
        rows = num_rows(problem)
        launches += (Launch(merge, rows),)
        buffers = workspace.splits(rows * splits, problem.head_dim_v)
    return Plan(
        problem, "decode", tile, launches, workspace=buffers,
        num_splits=splits,
    )  # fmt: skip


FORWARD = Maker(_forward, _shared, _fits)
