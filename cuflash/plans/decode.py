"""Plans of the decode kernel: few queries, many keys, 16-bit types."""

from __future__ import annotations

import functools
from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.options import acts
from cuflash.request.problem import ALIGNMENT, MAX_SPLITS, KVCache, Problem

from .append import append_launches, width_of_rotated
from .kernel import Constant, Device, KernelPlan, Launch, Maker, Plan
from .record import FamilyName
from .rounding import ceil_div, round_up
from .steps import (
    MAX_OF_TENSOR_CORES,
    element,
    element_bytes,
    has_left_bound,
    is_linear,
    is_packed,
    longest_run,
    lse_bytes,
    main_kernel,
    padded_head_dims,
    skips_tiles,
    tile_bytes,
    window_of,
)

_WARP_KEYS = 16  # decode/rows.cuh: a warp's keys of a tile

# Rows of (query, head of a group) pairs up to which keys are read once or
# twice. With more, the other kernels' tiles are full.
_MOST_ROWS = 64

# Rows up to which reading keys is the limit, whatever the options: 32 rows of
# 16 x 8,192 keys take 152 us on an H200, 163 with a user's mask, 161 with a
# user's score.
_FEW_ROWS = 32

_MANY_HEADS = 256  # more than two blocks for each SM of any GPU

# Below it, a call takes as long as its launch, whatever the kernel.
_FEWEST_KEYS = 512


def rows_of_head(problem: Problem) -> int:
    """The rows of a key head: each query, for each query head of the group."""
    return problem.seqlen_q * problem.group_size


def row_tiles(problem: Problem, block_q: int) -> int:
    """The row tiles of all key heads, each of which reads a head's keys."""
    tiles = ceil_div(rows_of_head(problem), block_q)
    return problem.batch * problem.num_heads_kv * tiles


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all."""
    return (
        problem.direction in ("forward", "kvcache")
        and problem.dtype in ("float16", "bfloat16")
        and not is_packed(problem)
        and (problem.kvcache is None or problem.kvcache.alignment == ALIGNMENT)
        and max(problem.head_dim, problem.head_dim_v) <= MAX_OF_TENSOR_CORES
    )


def pays(problem: Problem, device: Device) -> bool:
    """Whether it is faster than the kernels for many queries.

    On Hopper decode_sm90 has the calls of more rows.
    """
    if problem.block_q or problem.block_k:
        return False
    if problem.num_splits is not None:
        return True
    if is_short(problem):
        few = rows_of_head(problem) <= _FEW_ROWS
        if few or slowness_of_options(problem) == 1.0:
            return True
    elif device.arch == "sm_90a" or not may_split(problem):
        return False
    return _cost(problem, device) < cost_of_long(problem, device)


def may_split(problem: Problem) -> bool:
    """Whether a call has many keys for its queries, and no tile of its own.

    With more queries the other kernels lose at most a part of one round.
    """
    return (
        problem.block_q is problem.block_k is None
        and problem.seqlen_k >= max(_FEWEST_KEYS, 4 * problem.seqlen_q)
    )


# How much longer a tile of 128 rows and 128 keys takes, in four row tiles,
# than in sm80/forward.cu. Measured on an H200: docs/lab/decode.md.
_SLOWNESS = 2.0


def _cost(problem: Problem, device: Device) -> float:
    """The time, in tiles of sm80/forward.cu's, if all SMs have as many."""
    rows = _block_q(problem)
    tiles = ceil_div(problem.seqlen_k, 128)
    all_tiles = row_tiles(problem, rows) * tiles / device.num_sms
    slowness = _SLOWNESS * slowness_of_options(problem)
    return (all_tiles + PART_TILES) * rows / 128 * slowness


def slowness_of_options(problem: Problem) -> float:
    """How much longer a tile takes whose pairs are computed one by one."""
    acting = acts(problem)
    if "pairs" in acting or skips_tiles(problem):
        return 3.0  # the other kernels skip tiles, too
    return 1.0 if acting <= {"rows", "tiles"} else 2.0


def cost_of_long(problem: Problem, device: Device) -> float:
    """The time of the kernels for many queries, in their tiles of 128 x 128.

    A block has 128 queries of a head, and all keys that they see.
    """
    items = problem.batch * problem.num_heads_q
    items *= ceil_div(problem.seqlen_q, 128)
    tiles = ceil_div(visible_keys(problem), 128)
    return ceil_div(items, device.num_sms) * tiles


def visible_keys(problem: Problem) -> int:
    """The keys that some query sees, of a window with a left bound."""
    visible = window_of(problem) + problem.seqlen_q
    return int(min(visible, problem.seqlen_k))


def is_short(problem: Problem) -> bool:
    """Whether its queries do not fill the tiles of the other kernels."""
    return (
        rows_of_head(problem) <= _MOST_ROWS
        and problem.seqlen_k >= _FEWEST_KEYS
    )


def is_float8(problem: Problem) -> bool:
    """Whether the keys are stored as float8."""
    cache = problem.kvcache
    return cache is not None and cache.dtype == "float8_e4m3fn"


def _shared(problem: Problem, tile: Tile) -> int:
    """Bytes of decode/rows.cuh's SharedPlan."""
    d, dv = padded_head_dims(problem)
    loads = tile_bytes(tile.block_q, d)
    widths = (d // 2, dv // 2) if is_float8(problem) else (d, dv)
    loads += tile.num_warps * tile.num_stages * _keys_bytes(*widths)
    cache = problem.kvcache
    if cache is not None and cache.scales == "page":
        loads += tile.num_warps * tile.num_stages * 2 * 4 * _WARP_KEYS
    states = 4 * tile.num_warps * tile.block_q * (2 + dv + 8)
    return round_up(max(loads, states), 1024)


def _keys_bytes(d: int, dv: int) -> int:
    return tile_bytes(_WARP_KEYS, d) + tile_bytes(_WARP_KEYS, dv)


def _fits(problem: Problem, tile: Tile) -> bool:
    """Whether it is a tile that is fast for as many heads and rows.

    With num_splits it does not depend on the batch, so that a sequence's
    bits do not. 32 rows of more than 128 columns do not fit in a thread's
    registers. Two blocks of four warps on an SM overlap their ends; one of
    eight needs half as many parts of the keys. On an H200 128 x 2,048 keys
    take 252 us with four warps and 264 with eight, 1 x 8,192 keys 15.3 and
    14.4, 16 x 8,192 keys 130 and 125. Float8 keys are converted before use,
    so more warps pay: 16 x 8,192 keys take 66 us with twelve, 68 with eight
    and 70 with four; 64 x 8,192 keys of 64 columns 155 us with sixteen, 166
    with eight and 171 with four. Tiles of one stage, of GPUs without cp.async
    and with 64 KiB of shared memory, may have any number.
    """
    _, dv = padded_head_dims(problem)
    rows = _block_q(problem)
    few_heads = problem.num_splits or row_tiles(problem, rows) < _MANY_HEADS
    warps: tuple[int, ...] = (4, 8) if few_heads else (4,)
    if is_float8(problem):
        if _is_narrow(tile, dv):
            warps = (4, 8, 16)
        elif few_heads:
            warps = (4, 8, 12)
    of_warps = tile.num_warps in warps or tile.num_stages == 1
    return tile.block_q == rows and of_warps


def _block_q(problem: Problem) -> int:
    """The rows of a tile."""
    _, dv = padded_head_dims(problem)
    return 16 if rows_of_head(problem) <= 16 or dv > 128 else 32


def _is_narrow(tile: Tile, dv: int) -> bool:
    """Whether O takes so few registers that more warps fit on an SM."""
    return tile.block_q * dv <= 16 * 64


def resident_blocks(
    problem: Problem, device: Device, tile: Tile, shared: int
) -> int:
    """Blocks of an SM at once, for which the kernel is compiled.

    For 16 rows of 64 columns a thread needs up to 128 registers; 168 with
    options or balanced parts.
    """
    _, dv = padded_head_dims(problem)
    more = is_balanced(problem) or problem.options
    registers = 255
    if _is_narrow(tile, dv):
        registers = 168 if more and tile.num_warps < 16 else 128
    by_registers = 65536 // (tile.num_warps * 32 * registers)
    return max(min(by_registers, device.blocks_by_shared(shared)), 1)


PART_TILES = 2  # what a part costs at its ends, in tiles of 128 keys


def num_splits(
    problem: Problem, device: Device, tile: Tile, blocks_per_sm: int
) -> int:
    """Into how many parts the keys of a row tile are cut.

    The blocks that run at once read at the same rate, so the time is the
    number of waves times the tiles of a part, plus what a part costs at its
    ends. No warp of a part sums more keys than tensor cores may.
    """
    if problem.num_splits:
        return problem.num_splits
    return _best_splits(
        row_tiles(problem, tile.block_q),
        max(ceil_div(problem.seqlen_k, tile.block_k), 1),
        ceil_div(problem.seqlen_k, longest_run(device) * tile.num_warps),
        device.num_sms * blocks_per_sm,
    )


# Kept, as keys of `forward` may grow by one with each call: the same tiles.
@functools.lru_cache(maxsize=4096)
def _best_splits(heads: int, tiles: int, fewest: int, resident: int) -> int:
    def cost(splits: int) -> tuple[int, int]:
        waves = ceil_div(heads * splits, resident)
        return waves * (ceil_div(tiles, splits) + PART_TILES), splits

    most = min(tiles, MAX_SPLITS)
    return min(range(min(max(fewest, 1), most), most + 1), key=cost)


def is_balanced(problem: Problem) -> bool:
    """Whether parts have to be balanced by the device.

    Only it knows the sequences' lengths. All row tiles of one sequence have
    as many key tiles, whatever its length, so the same number of parts is
    right for each; but of a window, where most parts would be hidden.
    """
    cache = problem.kvcache
    if problem.num_splits is not None or cache is None:
        return False
    if problem.batch == 1 and not has_left_bound(problem):
        return False
    return cache.lengths or cache.packed_queries or cache.leftpad


# Of all row tiles' key tiles and ends, so that multiples of their number are
# ints of 32 bits: decode/parts.cuh.
_MOST_PLACES = 1 << 26


def parts_constants(problem: Problem, tile: Tile) -> tuple[Constant, ...]:
    """The constants of decode/parts.cuh."""
    key_tiles = ceil_div(problem.seqlen_k, tile.block_k) + PART_TILES
    places = row_tiles(problem, tile.block_q) * key_tiles
    is_wide = is_balanced(problem) and places > _MOST_PLACES
    return (("BALANCED", is_balanced(problem)), ("WIDE_PLACES", is_wide))


def cache_constants(problem: Problem) -> tuple[Constant, ...]:
    """The constants of decode/sequences.cuh and key_rows.cuh."""
    cache = problem.kvcache or KVCache(problem.dtype, None, 0)
    scales = {None: 0, "head": 1, "page": 2}
    return (
        ("KVCACHE", problem.kvcache is not None),
        ("LENGTHS", cache.lengths),
        ("PACKED_QUERIES", cache.packed_queries),
        ("PACKED_NEW", cache.packed_new),
        ("LEFTPAD", cache.leftpad),
        ("BATCH_IDX", cache.batch_idx),
        ("LATENT", cache.latent),
        ("PAGE_SIZE", cache.page_size or 0),
        ("Cached", "u8" if is_float8(problem) else element(problem)),
        ("SCALES", scales[cache.scales]),
    )


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = padded_head_dims(problem)
    shared = _shared(problem, tile)
    blocks_per_sm = resident_blocks(problem, device, tile, shared)
    main = main_kernel(
        problem, replace(tile, blocks_per_sm=blocks_per_sm), "decode", (d, dv),
        shared,
        ("NUM_STAGES", tile.num_stages),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        *parts_constants(problem, tile),
        *cache_constants(problem),
    )  # fmt: skip
    splits = num_splits(problem, device, tile, blocks_per_sm)
    return split_plan(
        problem, device, "decode", tile, main, blocks_per_sm, splits
    )


def split_plan(
    problem: Problem,
    device: Device,
    family: FamilyName,
    tile: Tile,
    main: KernelPlan,
    blocks_per_sm: int,
    splits: int,
) -> Plan:
    """Grid and workspace: see decode/parts.cuh.

    splits : parts of a row tile's keys, unless parts are balanced.
    """
    runs = row_tiles(problem, tile.block_q)
    resident = device.num_sms * blocks_per_sm
    if is_balanced(problem):
        runs = splits = blocks = resident
        slots = 2 * blocks
    else:
        blocks = slots = runs * splits
    launches: tuple[Launch, ...] = (Launch(main, blocks),)
    buffers: tuple[Buffer, ...] = ()
    if splits > 1:
        launches += (_merge_launch(problem, tile, main, runs, device.num_sms),)
        rows, size = slots * tile.block_q, lse_bytes(problem)
        numbers = 1 + problem.return_max_score  # of a row: decode/results.cuh
        buffers = (
            Buffer("split_out", size, rows * problem.head_dim_v),
            Buffer("split_lse", size, rows * numbers),
        )
    if not row_tiles(problem, tile.block_q):  # a call may only append
        launches = ()
    if problem.kvcache is not None:
        appended = append_launches(problem, cache_constants(problem))
        launches = (*appended, *launches)
        if problem.kvcache.rotary:
            rows = problem.kvcache.total_q * problem.num_heads_q
            elements = rows * width_of_rotated(problem)
            size = element_bytes(problem)
            buffers += (Buffer("rotated", size, elements),)
    return Plan(
        problem, family, tile, launches, workspace=buffers, num_splits=splits
    )


_MERGED_COLUMNS = 64  # of a warp: finish/merge_parts.cu

# Of balanced parts, which take long to find: the warps of a block, and the
# rows that each merges one after the other, if there are rows for all SMs.
_MOST_MERGING_WARPS, _ROUNDS_OF_MERGE = 16, 8
_FOUND_BYTES = 128  # finish/merge_parts.cu's FoundRowTile


def _merge_launch(
    problem: Problem, tile: Tile, main: KernelPlan, runs: int, num_sms: int
) -> Launch:
    """Merges the parts of row tiles that are cut.

    Each run of a balanced call has at most one; but the grid is by row tiles
    where these are fewer than runs.
    """
    all_row_tiles = row_tiles(problem, tile.block_q)
    of_blocks = is_balanced(problem) and all_row_tiles >= runs
    if not of_blocks:
        runs = all_row_tiles
    rows = min(max(rows_of_head(problem), 1), tile.block_q)
    warps = ceil_div(problem.head_dim_v, _MERGED_COLUMNS)
    slots = rows_of_block = 1
    if is_balanced(problem):
        slots = min(rows, max(_MOST_MERGING_WARPS // warps, 1))
        busy = all_row_tiles * ceil_div(rows, slots)
        rounds = 1  # a power of two, so that calls have few kernels
        while 2 * rounds <= min(busy // num_sms, _ROUNDS_OF_MERGE):
            rounds *= 2
        rows_of_block = min(rows, rounds * slots)
    shared = _FOUND_BYTES if slots > 1 else 0
    kept = {
        "Element", "CAUSAL", "BLOCK_Q", "BLOCK_K", "BALANCED", "WIDE_PLACES",
        "Arguments", "WINDOW", "SINK", "PACKED", "MAX_SCORE",
        *dict(cache_constants(problem)),
    }  # fmt: skip
    constants = tuple(x for x in main.constants if x[0] in kept)
    kernel = KernelPlan(
        file="finish/merge_parts.cu",
        entry="merge_parts",
        constants=(
            *constants,
            ("MERGE_ROWS", rows),
            ("RUNS_OF_BLOCKS", of_blocks),
            ("MERGE_SLOTS", slots),
            ("ROWS_OF_BLOCK", rows_of_block),
            ("NUM_WARPS", slots * warps),
            ("SHARED_BYTES", shared),
            ("HAS_MASK", False),
            ("SEGMENTS", False),
            ("MASK_MOD", False),
            ("FLAGS_OF_GROUPS", False),
        ),
        threads=32 * slots * warps,
        shared_bytes=shared,
        ptxas_level=3,  # loads under way together
    )
    blocks = runs * ceil_div(rows, rows_of_block)
    return Launch(kernel, blocks, overlaps=True)


FORWARD = Maker(_forward, _shared, _fits)
