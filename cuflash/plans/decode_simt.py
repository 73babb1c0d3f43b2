"""Plans of the decode kernel on CUDA cores: any dtype, head dimension, GPU."""

from __future__ import annotations

import functools
from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.request.problem import ALIGNMENT, Problem

from .decode import (
    PART_TILES,
    cache_constants,
    cost_of_long,
    is_float8,
    is_short,
    may_split,
    num_splits,
    parts_constants,
    row_tiles,
    rows_of_head,
    split_plan,
)
from .kernel import Device, Maker, Plan
from .rounding import ceil_div, round_up
from .steps import (
    MAX_OF_TENSOR_CORES,
    element_bytes,
    is_packed,
    lse_bytes,
    main_kernel,
    skips_tiles,
)

# Rows of a key head up to which keys are read a few times, from L2 but once;
# with more, costs are compared.
# On an H200 1 x 8,192 float32 keys, 32/2 heads of 128, take 25 us and by fma
# 1,754; 16 x 4,096, 32/8 heads of 64, 146 and 1,619.
_MOST_ROWS = 32


def runs(problem: Problem) -> bool:
    """Whether the kernel can compute a problem at all."""
    return (
        problem.direction in ("forward", "kvcache")
        and not is_packed(problem)
        and not problem.precision
        and problem.block_q is problem.block_k is None
    )


def pays(problem: Problem, device: Device) -> bool:
    """Whether it is faster than the kernels for many queries.

    decode/forward.cu and sm80 have the 16-bit types with other heads.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    has_16_bits = element_bytes(problem) == 2
    has_tensor_cores = has_16_bits and device.multiplies(problem.dtype)
    if has_tensor_cores and widest <= MAX_OF_TENSOR_CORES:
        return False
    if is_short(problem) and rows_of_head(problem) <= _MOST_ROWS:
        return True
    if has_16_bits or not may_split(problem) or skips_tiles(problem):
        return False
    block_q = _block_q(problem)
    if block_q < _FULL_TILE:  # keys are read too often
        return False
    return _cost(problem, device, block_q) < cost_of_long(problem, device)


_FULL_TILE = 8  # rows

# How much longer 128 rows and 128 keys take, in row tiles, than in the long
# kernel's tile of as many, by the bytes of an element. Measured on an H200 at
# head_dim 128 and 64 (33 to 160 rows a key head): float32 3.0 to 3.4 and 6.4,
# float64 8.6 to 10.4 and 8.3.
_SLOWNESS = {4: 6.5, 8: 10.5}


def _cost(problem: Problem, device: Device, block_q: int) -> float:
    """The time, in fma's tiles, as `decode` has it in sm80's."""
    tiles = row_tiles(problem, block_q) * ceil_div(problem.seqlen_k, 128)
    all_tiles = tiles / device.num_sms + PART_TILES
    return all_tiles * block_q / 128 * _SLOWNESS[element_bytes(problem)]


@functools.cache
def _vector(head_dim: int, size: int, alignment: int) -> int:
    """The elements of `size` bytes of a row that a lane loads at once.

    As few loads as possible, and among those the smallest: it leaves the
    fewest lanes idle.
    """
    legal = [
        vector
        for vector in (1, 2, 4, 8, 16)
        if vector * size <= alignment and head_dim % vector == 0
    ]
    return min(legal, key=lambda vector: ceil_div(head_dim, 32 * vector))


def _stored_bytes(problem: Problem) -> int:
    return 1 if is_float8(problem) else element_bytes(problem)


def _kv_vectors(problem: Problem) -> tuple[int, int]:
    """Those of rows of K and V."""
    size, alignment = _stored_bytes(problem), ALIGNMENT
    if problem.kvcache:
        alignment = problem.kvcache.alignment
    return (
        _vector(problem.head_dim, size, alignment),
        _vector(problem.head_dim_v, size, alignment),
    )


def _padded(problem: Problem) -> tuple[int, int]:
    """The head dimensions, padded so that each lane has as many columns."""
    of_k, of_v = _kv_vectors(problem)
    return (
        round_up(problem.head_dim, 32 * of_k),
        round_up(problem.head_dim_v, 32 * of_v),
    )


def _shared(problem: Problem, tile: Tile) -> int:
    """Bytes of decode/forward_simt.cu's SharedPlan."""
    _, dv = _padded(problem)
    return tile.num_warps * tile.block_q * (dv + 2) * lse_bytes(problem)


def _warp_keys(tile: Tile) -> int:
    return tile.block_k // tile.num_warps


def _kept(problem: Problem, block_q: int, warp_keys: int) -> int:
    """Registers of a thread for Q, acc, S and a warp's keys."""
    columns = sum(_padded(problem)) // 32
    words = block_q * (columns + warp_keys) * lse_bytes(problem) // 4
    size = _stored_bytes(problem)
    for head_dim, vector in zip(
        _padded(problem), _kv_vectors(problem), strict=True
    ):
        loads = head_dim // (32 * vector)
        words += warp_keys * loads * ceil_div(vector * size, 4)
    return words


def _others(problem: Problem) -> int:
    """Registers for addresses and weights, and for options.

    As seen with NVRTC 13: with fewer, some kernels spill.
    """
    needed = 8 * lse_bytes(problem) + 32
    return needed + 32 if problem.options else needed


# Bytes of keys that a thread has under way. With 8 warps on an SM, 256 of
# them are 64 KiB.
_LOADED = 256


def _block_q(problem: Problem) -> int:
    """The rows of a tile: those of a key head, if registers suffice."""
    rows = max(rows_of_head(problem), 1)
    return max(
        block_q
        for block_q in (1, 2, 4, 8)
        if block_q < 2 * rows and _fits_in_registers(problem, block_q, 1)
    )


def _fits_in_registers(problem: Problem, block_q: int, warp_keys: int) -> bool:
    if block_q == warp_keys == 1:  # the smallest tile has to do
        return True
    return _kept(problem, block_q, warp_keys) + _others(problem) <= 256


def _fits(problem: Problem, tile: Tile) -> bool:
    """Whether it is a tile of as many rows, which fits in registers.

    It does not depend on the batch, so that with num_splits a sequence's
    bits do not.
    """
    columns, keys = sum(_padded(problem)) // 32, _warp_keys(tile)
    loaded = keys * columns * _stored_bytes(problem)
    return (
        tile.block_q == _block_q(problem)
        and (loaded <= _LOADED or keys == 1)
        and _fits_in_registers(problem, tile.block_q, keys)
    )


def _decode_blocks_per_sm(
    problem: Problem, device: Device, tile: Tile, shared: int
) -> int:
    """Blocks of an SM at once, for which the kernel is compiled."""
    kept = _kept(problem, tile.block_q, _warp_keys(tile))
    # 32 more: loads are moved ahead where there is room for them.
    registers = min(round_up(kept + _others(problem) + 32, 8), 255)
    by_registers = 65536 // (tile.num_warps * 32 * registers)
    return max(min(by_registers, device.blocks_by_shared(shared)), 1)


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    shared = _shared(problem, tile)
    blocks_per_sm = _decode_blocks_per_sm(problem, device, tile, shared)
    of_k, of_v = _kv_vectors(problem)
    main = main_kernel(
        problem, replace(tile, blocks_per_sm=blocks_per_sm), "decode",
        _padded(problem), shared,
        ("WARP_KEYS", _warp_keys(tile)),
        ("K_VECTOR", of_k),
        ("V_VECTOR", of_v),
        *parts_constants(problem, tile),
        *cache_constants(problem),
        part="_simt",
    )  # fmt: skip
    splits = num_splits(problem, device, tile, blocks_per_sm)
    return split_plan(
        problem, device, "decode_simt", tile, main, blocks_per_sm, splits
    )


FORWARD = Maker(_forward, _shared, _fits)
