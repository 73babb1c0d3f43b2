"""Plans of the decode kernel of warpgroup MMAs: more rows, on Hopper."""

from __future__ import annotations

import functools

from cuflash.plans.tiles import Tile
from cuflash.request.problem import MAX_SPLITS, Problem

from . import decode, decode_latent
from .kernel import Device, Maker, Plan
from .rounding import ceil_div, round_up
from .steps import LONGEST_RUN, is_linear, kernel_of, tile_bytes

# The head dimensions that common/ptx.cuh has MMAs for.
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# Accumulators of a thread (S, P and O) that fit beside what options need, by
# blocks on an SM.
_MOST_ACCUMULATORS = {1: 176, 2: 150}

_PRODUCER_WARPS = 4

# Up to 32 rows decode/forward.cu reads keys at the speed of memory.
_FEWEST_ROWS = 33

# How much longer a tile of 128 rows and 128 keys takes than in
# sm90/forward.cu: 2.1 to 2.5 us instead of 1.5 to 1.65 on an H200.
_SLOWNESS = 1.5

# What a call of several parts takes besides: 1 x 8,192 keys, 64/8 heads,
# take 27, 34, 53 and 90 us of parts of 4, 8, 16 and 32 tiles.
_MERGE_TILES = 7


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all, on sm_90a."""
    if decode_latent.runs(problem):
        return True
    return decode.runs(problem) and not decode.is_float8(problem)


def has_rows(problem: Problem) -> bool:
    """Whether a key head has more rows than decode/forward.cu is fast for."""
    if decode_latent.runs(problem):  # its head dimensions are too large
        return True
    return decode.rows_of_head(problem) >= _FEWEST_ROWS


def pays(problem: Problem, device: Device) -> bool:
    """Whether it is faster than the other kernels."""
    if not decode.may_split(problem) or not has_rows(problem):
        return False
    rows = 64 if decode.rows_of_head(problem) <= 64 else 128
    tile = Tile(rows, 128, 0, 2 if rows == 64 else 1)
    splits = _num_splits(problem, device, tile)
    own = _cost(problem, device, tile, splits)
    own = (own + (_MERGE_TILES if splits > 1 else 0)) * rows / 128
    slowness = _SLOWNESS * decode.slowness_of_options(problem)
    return own * slowness < decode.cost_of_long(problem, device)


# What a part costs at its ends, in keys: the pipeline fills; O of each row is
# written and read again, as float32.
_PART_KEYS, _KEYS_OF_ROW = 256, 2

# Two blocks of 64 rows on an SM overlap; one alone takes this much longer.
_ALONE = 1.15


def _cost(problem: Problem, device: Device, tile: Tile, splits: int) -> float:
    """The time of a number of parts, in tiles of 128 keys."""
    return _cost_of(*_sizes(problem, device, tile), splits)


def _sizes(
    problem: Problem, device: Device, tile: Tile
) -> tuple[int, int, int, Tile, int]:
    """What `_cost_of` takes besides the number of parts."""
    tiles, seen = (
        ceil_div(max(keys, 1), tile.block_k)
        for keys in (problem.seqlen_k, decode.visible_keys(problem))
    )
    rows = decode.row_tiles(problem, tile.block_q)
    return rows, tiles, seen, tile, device.num_sms


def _cost_of(
    row_tiles: int, tiles: int, seen: int, tile: Tile, num_sms: int,
    splits: int,
) -> float:  # fmt: skip
    """Of row tiles that see so many of the key tiles.

    Parts that the window hides have ends alone.
    """
    of_part = min(ceil_div(tiles, splits), seen)
    parts = min(splits, ceil_div(seen, of_part))
    ends = _PART_KEYS + (_KEYS_OF_ROW * tile.block_q if splits > 1 else 0)
    rounds = ceil_div(row_tiles * parts, num_sms)
    all_rounds = ceil_div(row_tiles * splits, num_sms)
    alone = _ALONE if all_rounds < tile.blocks_per_sm else 1.0
    return alone * (rounds * of_part * tile.block_k + all_rounds * ends) / 128


def _num_splits(problem: Problem, device: Device, tile: Tile) -> int:
    """Into how many parts the keys of a row tile are cut.

    No warp sums more than LONGEST_RUN keys.
    """
    if problem.num_splits:
        return problem.num_splits
    fewest = ceil_div(decode.visible_keys(problem), LONGEST_RUN)
    return _best_splits(*_sizes(problem, device, tile), fewest)


# Kept, as keys of `forward` may grow by one with each call: the same tiles.
@functools.lru_cache(maxsize=4096)
def _best_splits(
    row_tiles: int, tiles: int, seen: int, tile: Tile, num_sms: int,
    fewest: int,
) -> int:  # fmt: skip
    def cost(splits: int) -> tuple[float, int]:
        sizes = row_tiles, tiles, seen, tile, num_sms
        return _cost_of(*sizes, splits), splits

    most = min(tiles, MAX_SPLITS)
    return min(range(min(max(fewest, 1), most), most + 1), key=cost)


def _head_dims(problem: Problem) -> tuple[int, int]:
    return _padded(problem.head_dim), _padded(problem.head_dim_v)


@functools.cache
def _padded(head_dim: int) -> int:
    return next(x for x in _HEAD_DIMS if x >= head_dim)


def _shared(problem: Problem, tile: Tile) -> int:
    """Bytes of decode/sm90_shared.cuh's SharedPlan."""
    d, dv = _head_dims(problem)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    stage = keys + 4 * 8 + 4 * _PRODUCER_WARPS  # barriers; `replaced`
    queries = tile_bytes(tile.block_q, d)
    return round_up(queries + tile.num_stages * stage, 1024)


def _fits(problem: Problem, tile: Tile) -> bool:
    """Whether a tile has as many rows, and fits in registers.

    It does not depend on the batch, so that with num_splits a sequence's
    bits do not.
    """
    _, dv = _head_dims(problem)
    rows = 64 if decode.rows_of_head(problem) <= 64 else 128
    used = tile.block_k * 3 // 4 + dv // 2
    most = _MOST_ACCUMULATORS[tile.blocks_per_sm]
    warps = (tile.block_q // 64 + 1) * 4
    return tile.block_q == rows and tile.num_warps == warps and used <= most


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _shared(problem, tile)
    main = kernel_of(
        problem, tile, "decode", _head_dims(problem), shared,
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("KV_STAGES", tile.num_stages),
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        *decode.parts_constants(problem, tile),
        *decode.cache_constants(problem),
        part="_sm90",
    )  # fmt: skip
    return decode.split_plan(
        problem, device, "decode_sm90", tile, main,
        tile.blocks_per_sm, _num_splits(problem, device, tile),
    )  # fmt: skip


FORWARD = Maker(_forward, _shared, _fits)
