"""Plans of the kernels for 16-bit types by wgmma, on Hopper."""

from __future__ import annotations

from cuflash import workspace
from cuflash.options import has_order
from cuflash.problem import Problem
from cuflash.tiles import Tile
from cuflash.workspace import Buffer

from .kernel import Device, KernelPlan, Launch, Maker, Plan, StaticSchedule
from .rounding import ceil_div, round_up
from .steps import (
    ROW_THREADS,
    count_tiles,
    finding_launches,
    found_buffers,
    heads_per_section,
    is_linear,
    is_packed,
    option_constants,
    rounding_launch,
    sink_launches,
    some_options,
    tile_bytes,
    window_of,
)

# What common/ptx.cuh has MMAs for, and shared memory room.
_HEAD_DIMS = {
    "forward": (64, 96, 128, 192, 256),
    "backward": (64, 128, 192, 256),
}


# A thread's registers: 240 with two consumer warpgroups, 160 with three. S and
# P take 3/4 of block_k, acc half of head_dim_v. Sums up to these were seen not
# to spill, 132 with three was.
_REGISTERS = {2: 196, 3: 128}


# What a mask takes besides, or a softcap next to some. At head_dim above 128
# there is no smaller tile that is fast: there a few bytes are spilt.
_OPTION_REGISTERS = 32


_MBARRIER_BYTES, _WORK_BYTES = 8, 20


# Larger heads leave no room for slopes as a product.
_WIDEST_WITH_SLOPES = 192


_SEQUENCE_BYTES = 6 * 4  # common/packed_sequences.cuh's Sequence


def _head_dims(problem: Problem) -> tuple[int, int]:
    """Rounded up to those that there are kernels for: see `runs`."""
    d, dv = (
        next(x for x in _HEAD_DIMS[problem.direction] if x >= d)
        for d in (problem.head_dim, problem.head_dim_v)
    )
    return d, dv


def runs(problem: Problem, device: Device) -> bool:
    # Only neighbouring key tiles add to dQ in order.
    no_order = problem.deterministic and not has_order(problem, "wgmma")
    return (
        device.arch == "sm_90a"
        and problem.seqlen_k > 0
        and not no_order
        and max(problem.head_dim, problem.head_dim_v)
        <= _HEAD_DIMS[problem.direction][-1]
    )


def _shared(problem: Problem, tile: Tile, q_stages: int) -> int:
    d, dv = _head_dims(problem)
    queries = tile_bytes(tile.block_q, max(d, dv))
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    barriers = 2 * q_stages + 4 * tile.num_stages  # full and empty: q; k, v
    works, work = max(q_stages, 2), _WORK_BYTES
    if is_packed(problem):
        work += _SEQUENCE_BYTES
    if _is_counted(problem):
        barriers += works + 1  # full and requested
    return round_up(
        q_stages * queries
        + tile.num_stages * keys
        + round_up(works * work + barriers * _MBARRIER_BYTES, 16)
        + (_biases_bytes(tile) if _is_staged(problem) else 0)
        + (4 * tile.num_stages if _is_listed(problem) else 4)
        + (_ids_bytes(tile) if problem.segment_ids else 0)
        + (_slopes_bytes(tile) if _in_product(problem) else 0),
        1024,
    )


def _is_staged(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's STAGED_BIAS."""
    return problem.bias in ("float16", "bfloat16")


def _biases_bytes(tile: Tile) -> int:
    """Of all rows and keys (rounded up to 32), each row padded by 16 bytes."""
    return tile.block_q * (round_up(tile.block_k, 32) * 2 + 16)


def _ids_bytes(tile: Tile) -> int:
    """Of keys, in twice as many stages as K."""
    return 2 * tile.num_stages * tile.block_k * 4


def _in_product(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's ALIBI_MMA."""
    beside = problem.softcap or problem.bias
    return (
        problem.alibi_slopes
        and not beside
        and max(_head_dims(problem)) <= _WIDEST_WITH_SLOPES
    )


def _slopes_bytes(tile: Tile) -> int:
    return tile_bytes(16, tile.block_k)


def _is_listed(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's SPARSE_TILES."""
    return problem.segment_ids or problem.mask


def _is_counted(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's DYNAMIC_SCHEDULER."""
    return is_packed(problem) or problem.segment_ids


def _forward_shared(problem: Problem, tile: Tile) -> int:
    """With one tile of queries; more are taken if there is room."""
    return _shared(problem, tile, 1)


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = _head_dims(problem)
    used = tile.block_k * 3 // 4 + dv // 2
    capped_besides = problem.softcap and (
        problem.bias or problem.segment_ids or is_packed(problem)
    )
    if dv <= 128 and (problem.mask or capped_besides):
        used += _OPTION_REGISTERS
    if dv <= 128 and problem.bias:
        used += tile.block_k // 4  # of them, from shared memory
    return used <= _REGISTERS[tile.block_q // 64]


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _head_dims(problem)
    q_stages, shared = next(
        (stages, room)
        for stages in (3, 2, 1)
        if (room := _shared(problem, tile, stages)) <= device.shared_bytes
    )
    kernel = KernelPlan(
        file="sm90/forward.cu",
        entry="forward_wgmma",
        constants=(
            ("Element", problem.dtype),
            ("HEAD_DIM", d),
            ("HEAD_DIM_V", dv),
            ("CAUSAL", problem.causal),
            ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("Q_STAGES", q_stages),
            ("KV_STAGES", tile.num_stages),
            ("SHARED_BYTES", shared),
            *option_constants(problem, "Wgmma"),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
    )
    num_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    items = heads * num_tiles
    is_counted = _is_counted(problem)
    by_length = not (is_counted or _is_in_rounds(problem)) and problem.causal
    schedule = _static_schedule(num_tiles, heads, by_length, device)
    return Plan(
        problem,
        "wgmma",
        tile,
        (
            *finding_launches(problem, tile, "Wgmma"),
            Launch(kernel, min(schedule.items, device.num_sms)),
        ),
        heads_per_section=_heads_beside(problem, tile, device),
        work_items=schedule,
        workspace=_found_buffers(
            problem, tile, num_tiles, items if is_counted else 0
        ),
    )


def _found_buffers(
    problem: Problem, tile: Tile, num_tiles: int, tiles_of_blocks: int = 0
) -> tuple[Buffer, ...]:
    ordered = problem.batch * num_tiles if problem.segment_ids else 0
    return found_buffers(problem, tile, tiles_of_blocks, ordered)


def _is_in_rounds(problem: Problem) -> bool:
    """sm90/forward_scheduler.cuh's BALANCED_ROUNDS, for static schedules."""
    has_window = "window" in problem.options
    return has_window or bool(problem.bias and not problem.causal)


# Tiles of the last section, a multiprocessor's share. Its longest come first,
# but none of another section fill up what the shortest leave at the end.
_TILES_AT_LAST = 4


# Where tiles are taken longest first: of as many heads at least, so that a
# section has short ones enough for its end.
_HEADS_IN_ORDER = 4


# With one bias of 16,384 x 16,384 for 16 heads 1, 2, 4, 8 and 16 were seen to
# take 5.92, 5.73, 5.59, 5.72 and 5.79 ms.
_HEADS_BESIDE_A_BIAS = 4


def _heads_beside(problem: Problem, tile: Tile, device: Device) -> int:
    """Heads whose query tiles are computed side by side, in a section.

    As many as have their keys in L2. Where blocks take tiles of packed
    sequences from a counter, at least as many as keep all of them busy with
    the last section, and sections are alike. With a bias and no window one,
    or, where many may have the same and L2 has no room for it, a few. With
    segment ids `_heads_in_order`.
    """
    d, dv = _head_dims(problem)
    heads = problem.batch * problem.num_heads_q
    seen = int(min(window_of(problem), problem.seqlen_k))
    beside = heads_per_section(
        problem, device, heads, seen * (d + dv) * 2 // problem.group_size
    )
    if problem.segment_ids:
        return _heads_in_order(problem.num_heads_q, beside)
    if is_packed(problem):
        num_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
        least = ceil_div(_TILES_AT_LAST * device.num_sms, num_tiles)
        return _alike(heads, max(beside, least))
    if problem.bias and "window" not in problem.options:
        item_bytes = 4 if problem.bias == "float32" else 2
        bias_bytes = problem.seqlen_q * problem.seqlen_k * item_bytes
        shared = problem.bias_is_broadcast and bias_bytes > device.l2_bytes
        return min(_HEADS_BESIDE_A_BIAS, heads) if shared else 1
    return beside


def _heads_in_order(heads: int, beside: int) -> int:
    """Heads of a section where tiles are taken longest first.

    Each is one of all batches: common/scheduler.cuh's tile_in_order.
    """
    return _alike(heads, max(beside, _HEADS_IN_ORDER))


def _alike(heads: int, least: int) -> int:
    """Heads of a section, all as large and of at least so many, or all."""
    return ceil_div(heads, max(heads // least, 1))


def _static_schedule(
    num_tiles: int, heads: int, by_length: bool, device: Device
) -> StaticSchedule:
    """In pairs where tiles differ in length and there are many."""
    pairs = num_tiles // 2 if by_length else 0
    if heads * (num_tiles - pairs) < device.num_sms:
        pairs = 0
    singles = num_tiles - 2 * pairs
    return StaticSchedule(
        pairs, singles, heads * pairs, heads * (pairs + singles)
    )


# QueryRows (kernels/sm90/query_rows.cuh): lse and delta of each row, and four
# numbers of the tile.
_ROW_BYTES, _ROWS_BYTES = 2 * 4, 16


# Accumulators that were seen to fit 240 registers: 208 of them with P in
# float, 192 with dS from the rounded P.
_BACKWARD_REGISTERS = 208


# Where key tiles take turns, more heads side by side were seen to cost up to
# 10 % at seqlen 512; fewer cost as much at 4096.
_MOST_HEADS_IN_TURNS = 16


def _backward_head_dims(problem: Problem) -> tuple[int, int]:
    """As `_head_dims`, the first no smaller than the second."""
    d, dv = _head_dims(problem)
    return max(d, dv), dv


def _rows_bytes(problem: Problem, tile: Tile) -> int:
    ids = 4 * tile.block_q if problem.segment_ids else 0
    return tile.block_q * _ROW_BYTES + _ROWS_BYTES + ids


def _is_wide(tile: Tile) -> bool:
    """Whether a wgmma tile is one of sm90/backward_wide.cu's.

    Its warpgroups have the same 64 keys, and one thing to compute each.
    """
    return tile.block_k == 64


def _has_short_walks(problem: Problem) -> bool:
    """Of few iterations: DOUBLE_BUFFERED_K (sm90/backward_shared.cuh)."""
    return not {"window", "segment_ids"}.isdisjoint(problem.options)


def _backward_shared(problem: Problem, tile: Tile) -> int:
    d, dv = _backward_head_dims(problem)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    queries = tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    ds = 2 * tile_bytes(tile.block_k, tile.block_q)
    dq = tile.block_q * d * 4
    barriers = 4 * tile.num_stages + 3 + 2 * 2  # q and dout; k, v; work
    work = 3 * 4 + (_SEQUENCE_BYTES if is_packed(problem) else 0)
    if not _is_wide(tile):
        barriers += 2 * 2  # ds
        if _has_short_walks(problem):
            keys += tile_bytes(tile.block_k, d)
            barriers += 3
    else:
        ds *= tile.num_stages  # and p; dq leaves from registers
        dq = 0
        barriers += 2 * tile.num_stages
    return round_up(
        keys
        + tile.num_stages * (queries + _rows_bytes(problem, tile))
        + ds
        + dq
        + barriers * _MBARRIER_BYTES
        + 2 * work
        + 4 * (tile.num_stages if problem.segment_ids else 1),  # flags
        1024,
    )


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _backward_head_dims(problem)
    if _is_wide(tile):
        return True  # it deals out registers by head_dim
    if tile.block_q * d != tile.block_k // 64 * 64 * 64:
        return False  # a warpgroup's part of dq is 64 x 64
    if (problem.softcap or problem.dropout) and tile.block_q > 64:
        return False  # no room for derivatives, or for P and what is kept
    scores = tile.block_q * 5 // 4 if tile.block_q <= 64 else tile.block_q
    return (d + dv) // 2 + scores <= _BACKWARD_REGISTERS


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _backward_head_dims(problem)
    shared = _backward_shared(problem, tile)
    wide = "_wide" if _is_wide(tile) else ""
    # Those that have dq: a warpgroup loads, two have dv and dk.
    dq_warps = 4 if _is_wide(tile) else tile.num_warps - 4
    turns_of_tile = dq_warps // 4 if problem.deterministic else 0
    layout = (
        ("Element", problem.dtype),
        ("HEAD_DIM", d),
        ("HEAD_DIM_V", dv),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("NUM_WARPS", dq_warps),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("CAUSAL", problem.causal),
        ("TURNS", turns_of_tile),
    )
    lanes = ceil_div(problem.head_dim_v, 8)
    rows = KernelPlan(
        file="prepare/query_rows.cu",
        entry="backward_rows",
        constants=(
            ("Element", problem.dtype),
            ("HEAD_DIM", d),
            ("BLOCK_Q", tile.block_q),
            ("BLOCK_K", tile.block_k),
            ("TURNS", turns_of_tile),
            ("NUM_THREADS", ROW_THREADS),
            ("LANES", 1 << (lanes - 1).bit_length()),
            *some_options(
                problem, "Wgmma", "SOFTCAP", "ALIBI", "BIAS", "SEGMENTS"
            ),
        ),
        threads=ROW_THREADS,
        shared_bytes=0,
    )
    main = KernelPlan(
        file=f"sm90/backward{wide}.cu",
        entry=f"backward_wgmma{wide}",
        constants=(
            *layout,
            ("STAGES", tile.num_stages),
            ("SHARED_BYTES", shared),
            *option_constants(problem, "Wgmma"),
        ),
        threads=tile.num_warps * 32,
        shared_bytes=shared,
        ptxas_level=tile.ptxas_level,
    )
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    q_tiles *= problem.batch * problem.num_heads_q
    kv_pairs = problem.batch * problem.num_heads_kv
    k_tiles_of_head = count_tiles(problem, problem.seqlen_k, tile.block_k)
    k_tiles = k_tiles_of_head * kv_pairs
    seen_by = int(min(window_of(problem), problem.seqlen_q))
    heads = heads_per_section(
        problem,
        device,
        problem.num_heads_kv,
        # q, dout: 2 bytes an element; the sums of dq: 4
        problem.group_size * seen_by * (6 * d + 2 * dv),
    )
    if problem.segment_ids:
        heads = _heads_in_order(problem.num_heads_kv, heads)
    if problem.deterministic and not problem.causal:
        heads = min(heads, _MOST_HEADS_IN_TURNS)
    options = {"window", "segment_ids", "mask", "cu_seqlens"}
    hides = problem.causal or not options.isdisjoint(problem.options)
    return Plan(
        problem,
        "wgmma",
        tile,
        (
            *finding_launches(problem, tile, "Wgmma"),
            Launch(rows, q_tiles),
            Launch(main, min(k_tiles, device.num_sms)),
            rounding_launch(
                problem,
                tile,
                (d, dv),
                q_tiles + (k_tiles if hides else 0),
                dq_warps,
                "Wgmma",
                repairs=hides,
                turns=turns_of_tile,
            ),
            *sink_launches(problem, tile, "Wgmma"),
        ),  # fmt: skip
        heads_per_section=heads,
        workspace=(
            *_found_buffers(problem, tile, k_tiles_of_head),
            workspace.query_rows(q_tiles, _rows_bytes(problem, tile)),
            workspace.dq_sum(q_tiles * tile.block_q * d),
            workspace.counters(
                recompute_flags=k_tiles,
                dq_semaphores=q_tiles * turns_of_tile,
            ),
        ),
    )


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
