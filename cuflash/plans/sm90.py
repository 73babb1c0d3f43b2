"""Plans of the wgmma kernels: 16-bit types, on Hopper."""

from __future__ import annotations

from dataclasses import replace

from cuflash.expressions import builtin, derivative, nodes
from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request import softcap as softcaps
from cuflash.request.options import acts, has_order
from cuflash.request.problem import Problem

from .kernel import (
    Constant,
    Device,
    KernelPlan,
    Launch,
    Maker,
    Plan,
    StaticSchedule,
    shared_bytes_of_block,
)
from .rounding import ceil_div, round_up
from .simt_derivatives import recompute_launch
from .steps import (
    LAST_TILES,
    ROW_THREADS,
    count_mask_words,
    count_tiles,
    gradients_of_rows,
    has_lse_rests,
    heads_per_section,
    is_linear,
    is_packed,
    is_wide,
    kernel_of,
    key_tiles,
    last_section,
    lse_rest_buffers,
    lse_rest_launches,
    option_buffers,
    option_constants,
    option_launches,
    query_tiles,
    rounding_launch,
    row_kernel,
    run_tiles,
    skips_tiles,
    some_options,
    tile_bytes,
    window_of,
)

# The head dimensions that common/ptx.cuh has MMAs for and that fit in shared
# memory; for derivatives, in registers too.
_HEAD_DIMS = {
    "forward": (32, 64, 96, 128, 192, 256),
    "backward": (32, 64, 128, 192, 256),
    "jvp": (32, 64, 96, 128),
    "double_backward": (32, 64, 96, 128),
}


# By consumer warpgroups of a block, and blocks of an SM. A thread has 240
# registers with two consumers, 160 with three; with one, 232 or 136. S and P
# use block_k * 3/4 registers, acc head_dim_v / 2. Sums up to the values below
# do not spill; with three consumers, 132 does.
_REGISTERS = {(2, 1): 196, (3, 1): 128, (1, 2): 188, (1, 3): 96}


# Extra registers for a mask, or for bent scores with certain other options.
# Above head_dim 128 no smaller tile is fast, so a few bytes are spilled.
_OPTION_REGISTERS = 32


# Extra registers for a user's function of scores, unless it only adds to
# them, in a call without other options.
_USER_REGISTERS = 24


MBARRIER_BYTES, _WORK_BYTES = 8, 20

_PANEL_COLUMNS = 64  # common/smem.cuh


# Larger head dimensions leave no shared memory for ALiBi's MMA.
_WIDEST_WITH_SLOPES = 192


_SEQUENCE_BYTES = 6 * 4  # common/packed_sequences.cuh's Sequence


def head_dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions, rounded up to supported ones: see `runs`."""
    if has_wide_heads(problem):
        # Whole panels, at least one for each half of a result's columns.
        least = 2 * _PANEL_COLUMNS
        d, dv = (
            max(round_up(x, _PANEL_COLUMNS), least)
            for x in (problem.head_dim, problem.head_dim_v)
        )
        return d, dv
    d, dv = (
        next(x for x in _HEAD_DIMS[problem.direction] if x >= d)
        for d in (problem.head_dim, problem.head_dim_v)
    )
    return d, dv


def has_wide_heads(problem: Problem) -> bool:
    """Whether kernels for wide heads are for the problem's head dimensions.

    sm90/forward_wide.cu and backward_passes.cu.
    """
    return problem.direction in ("forward", "backward") and is_wide(problem)


def sum_chunk(columns: int) -> int:
    """sm90/wide_heads.cuh's sum_chunk()."""
    panels = columns // _PANEL_COLUMNS
    return _PANEL_COLUMNS * (2 if panels % 2 == 0 else 1)


def runs(problem: Problem, device: Device) -> bool:
    """Whether the kernels support the problem; see `runs_derivatives` too.

    They do not skip tiles of packed sequences for a user's mask. Integer sums
    of dQ need a bound of dS, which the slope of a user's function may exceed.
    """
    if problem.mask_mod is not None and is_packed(problem):
        return False
    if score_bends(problem) and has_integer_dq(problem):
        return False
    return (
        device.arch == "sm_90a"
        and problem.seqlen_k > 0
        and max(problem.head_dim, problem.head_dim_v)
        <= _HEAD_DIMS[problem.direction][-1]
    )


def runs_derivatives(
    problem: Problem, device: Device, options: tuple[str, ...] = ()
) -> bool:
    """Whether kernels of derivatives that have these options support it.

    They store rows of head_dim_v elements 16 bytes at a time.
    """
    tangents = problem.tangents
    return bool(
        runs(problem, device)
        and {*options}.issuperset(problem.options)
        and tangents is not None
        and tangents.count > 0
        and problem.head_dim_v % 8 == 0
    )


def _shared(problem: Problem, tile: Tile, q_stages: int) -> int:
    d, dv = head_dims(problem)
    queries = tile_bytes(tile.block_q, max(d, dv))
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    barriers = 2 * q_stages + 4 * tile.num_stages  # full and empty: q; k, v
    return round_up(
        q_stages * queries
        + tile.num_stages * keys
        + small_bytes(problem, max(q_stages, 2), barriers)
        + (_biases_bytes(tile) if _has_staged_bias(problem) else 0)
        + (4 * tile.num_stages if _has_sparse_tiles(problem) else 4)
        + (_ids_bytes(tile) if problem.segment_ids else 0)
        + (_slopes_bytes(tile) if _has_alibi_mma(problem) else 0),
        1024,
    )


def small_bytes(problem: Problem, works: int, barriers: int) -> int:
    """Bytes of as many work tiles, with their barriers, and others."""
    work = _WORK_BYTES + (_SEQUENCE_BYTES if is_packed(problem) else 0)
    if _has_dynamic_scheduler(problem):
        barriers += works + 1  # full and requested
    return round_up(works * work + barriers * MBARRIER_BYTES, 16)


def _has_staged_bias(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's STAGED_BIAS."""
    return problem.bias in ("float16", "bfloat16")


def _biases_bytes(tile: Tile) -> int:
    """Bias of the tile; keys rounded up to 32, rows padded by 16 bytes."""
    return tile.block_q * (round_up(tile.block_k, 32) * 2 + 16)


def _ids_bytes(tile: Tile) -> int:
    """Segment ids of the keys, with twice as many stages as K."""
    return 2 * tile.num_stages * tile.block_k * 4


def _has_alibi_mma(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's ALIBI_MMA."""
    return (
        problem.alibi_slopes
        and not problem.bias
        and "bends" not in acts(problem)
        and problem.score_mod is None
        and max(head_dims(problem)) <= _WIDEST_WITH_SLOPES
    )


def _slopes_bytes(tile: Tile) -> int:
    return tile_bytes(16, tile.block_k)


def _has_sparse_tiles(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's SPARSE_TILES."""
    return problem.mask or skips_tiles(problem)


def _has_dynamic_scheduler(problem: Problem) -> bool:
    """sm90/forward_shared.cuh's DYNAMIC_SCHEDULER."""
    return is_packed(problem) or skips_tiles(problem)


def with_capped_score(problem: Problem) -> Problem:
    """The problem with its softcap as a part of the user's score.

    Kernels of derivatives have a score, and no softcap. Their text has the
    number in it. A large softcap stays what it is: tanh is exact there.
    """
    p = problem
    if not p.softcap or softcaps.is_large(p.softcap, p.dtype):
        return p
    score = builtin.with_softcap(p.softcap, p.score_mod)
    return replace(p, softcap=0.0, score_mod=score)


def score_bends(problem: Problem) -> bool:
    """Whether the user's function of a score has a slope other than 1."""
    if problem.score_mod is None:
        return False
    return not nodes.same_constant(derivative.slope(problem.score_mod), 1)


def _bends(problem: Problem) -> bool:
    """sm90/backward_constants.cuh's SCORES_BEND."""
    return "bends" in acts(problem) or score_bends(problem)


def scores_twice(problem: Problem) -> bool:
    """Whether gradients of scores are summed that P does not suffice for.

    The slope of a user's function is not 1, or the gradients of its arrays
    depend on the score.
    """
    score, dmods = problem.score_mod, problem.return_dmod
    if score is None or not (problem.return_dbias or dmods):
        return False
    gathers = derivative.of_gathers(score, dmods) if dmods else {}
    needed = [x for g, by in gathers.items() for x in (by, *g.args)]
    return _bends(problem) or any("score" in x.depends for x in needed)


def _forward_shared(problem: Problem, tile: Tile) -> int:
    """With one stage of Q; `_forward` uses more if they fit."""
    return _shared(problem, tile, 1)


def _forward_fits(problem: Problem, tile: Tile) -> bool:
    _, dv = head_dims(problem)
    room = _REGISTERS.get((tile.block_q // 64, tile.blocks_per_sm), 0)
    used = tile.block_k * 3 // 4 + dv // 2
    has_more = score_bends(problem) or acts(problem) != {"adds"}
    if dv <= 128 and problem.score_mod is not None and has_more:
        used += _USER_REGISTERS
    bent_and_more = "bends" in acts(problem) and (
        problem.bias or problem.segment_ids or is_packed(problem)
    )
    if dv <= 128 and (problem.mask or bent_and_more):
        used += _OPTION_REGISTERS
    if dv <= 128 and problem.bias:
        used += tile.block_k // 4  # biases read from shared memory
    return used <= room


def _forward(problem: Problem, device: Device, tile: Tile) -> Plan:
    most = shared_bytes_of_block(device, tile.blocks_per_sm)
    q_stages, shared = next(
        (stages, room)
        for stages in (3, 2, 1)
        if (room := _shared(problem, tile, stages)) <= most
    )
    kernel = kernel_of(
        problem, tile, "sm90", head_dims(problem), shared,
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("Q_STAGES", q_stages),
        ("KV_STAGES", tile.num_stages),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("MASK_BITS", count_mask_words(problem, tile) > 0),
        run_tiles(problem, tile),
    )  # fmt: skip
    return forward_plan(problem, device, tile, kernel)


def forward_plan(
    problem: Problem, device: Device, tile: Tile, kernel: KernelPlan
) -> Plan:
    """The plan of a forward kernel of this family."""
    num_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    items = heads * num_tiles
    is_dynamic = _has_dynamic_scheduler(problem)
    has_pairs = problem.causal and not (
        is_dynamic or _has_balanced_rounds(problem)
    )
    blocks = device.num_sms * tile.blocks_per_sm
    schedule = _static_schedule(num_tiles, heads, has_pairs, blocks)
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *option_launches(problem, tile, "sm90"),
            Launch(kernel, min(schedule.items, blocks)),
        ),
        heads_per_section=_section_heads(problem, tile, device),
        work_items=schedule,
        workspace=(
            *buffers_of_options(problem, tile, num_tiles),
            *_scheduler_buffers(items if is_dynamic else 0),
        ),
    )


def buffers_of_options(
    problem: Problem, tile: Tile, tiles_of_head: int
) -> tuple[Buffer, ...]:
    """With the order of tiles that the blocks follow, and a mask's bits."""
    ordered = problem.batch * tiles_of_head if skips_tiles(problem) else 0
    own = (
        Buffer("tile_order", 4, ordered),
        Buffer("mask_bits", 4, count_mask_words(problem, tile)),
    )
    return (*option_buffers(problem, tile), *(x for x in own if x.elements))


def _scheduler_buffers(tiles: int) -> tuple[Buffer, ...]:
    """Of a dynamic scheduler, for as many tiles; 0: none."""
    if not tiles:
        return ()
    return (
        Buffer("tile_counter", 4, 1),
        Buffer("previous_tiles", 4, tiles),
    )


def _has_balanced_rounds(problem: Problem) -> bool:
    """sm90/forward_scheduler.cuh's BALANCED_ROUNDS, for static schedules."""
    has_window = "window" in problem.options
    return has_window or bool(problem.bias and not problem.causal)


# Tiles per SM in the last section. Its longest tiles run first, but no other
# section's tiles fill the SMs that become idle at the end.
_LAST_SECTION_TILES = 4


# The fewest heads of a section whose tiles run longest first: it then has
# enough short tiles for its end.
_MIN_ORDERED_HEADS = 4


# Measured with one bias of 16,384 x 16,384 shared by 16 heads: sections of 1,
# 2, 4, 8 and 16 heads take 5.92, 5.73, 5.59, 5.72 and 5.79 ms.
_SHARED_BIAS_HEADS = 4


def _section_heads(problem: Problem, tile: Tile, device: Device) -> int:
    """The number of heads in a section: their query tiles run concurrently.

    As many heads as keep their K and V in L2. With packed sequences (dynamic
    scheduler), at least as many as keep all blocks busy in the last section,
    in sections of equal size. With a bias and no window, one head; a few if
    heads may share the bias and it does not fit in L2. Where tiles are
    skipped, see `_ordered_heads`.
    """
    d, dv = head_dims(problem)
    heads = problem.batch * problem.num_heads_q
    visible_keys = int(min(window_of(problem), problem.seqlen_k))
    fitting = heads_per_section(
        problem,
        device,
        heads,
        visible_keys * (d + dv) * 2 // problem.group_size,
    )
    if skips_tiles(problem):
        return _ordered_heads(problem, problem.num_heads_q, fitting)
    if is_packed(problem):
        num_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
        least = ceil_div(_LAST_SECTION_TILES * device.num_sms, num_tiles)
        return _equal_sections(heads, max(fitting, least))
    if problem.bias and "window" not in problem.options:
        item_bytes = 4 if problem.bias == "float32" else 2
        bias_bytes = problem.seqlen_q * problem.seqlen_k * item_bytes
        shared = problem.bias_is_broadcast and bias_bytes > device.l2_bytes
        return min(_SHARED_BIAS_HEADS, heads) if shared else 1
    return fitting


def _ordered_heads(problem: Problem, heads: int, fitting: int) -> int:
    """Heads of a section whose tiles run longest first.

    A head counts for all batches: tile_in_order of common/scheduler.cuh. A
    user's mask may show a tile all keys; segments are taken to be short.
    """
    if problem.mask_mod is not None:
        fitting //= problem.batch
    return _equal_sections(heads, max(fitting, _MIN_ORDERED_HEADS))


def _equal_sections(heads: int, least: int) -> int:
    """Heads per section: sections of equal size, at least `least` or all."""
    return ceil_div(heads, max(heads // least, 1))


def _static_schedule(
    num_tiles: int, heads: int, has_pairs: bool, blocks: int
) -> StaticSchedule:
    """Pairs of tiles if their lengths differ and there are enough tiles."""
    pairs = num_tiles // 2 if has_pairs else 0
    if heads * (num_tiles - pairs) < blocks:
        pairs = 0
    singles = num_tiles - 2 * pairs
    return StaticSchedule(
        pairs, singles, heads * pairs, heads * (pairs + singles)
    )


def has_integer_dq(problem: Problem) -> bool:
    """Whether the sums of dQ are integers: sm90/integer_dq.cuh's INTEGER_DQ.

    Otherwise a deterministic dQ is summed in order, for which the key tiles
    that visit a query tile have to be consecutive.
    """
    in_order = has_order(problem, "sm90") and problem.mask_mod is None
    return problem.deterministic and not in_order


# A KeyMaxima of sm90/integer_dq.cuh.
_KEY_MAXIMA_BYTES = 16


# Row statistics of a query tile (sm90/row_stats.cuh): lse and delta of each
# row, and four numbers per tile.
_ROW_BYTES, _ROWS_BYTES = 2 * 4, 16


# Accumulators that fit in 240 registers, as measured: 208 with P in float,
# 192 with dS computed from the rounded P.
_BACKWARD_REGISTERS = 208


# With dq_semaphore, as measured: more concurrent heads, if they have many
# query tiles, cost up to 10 %.
MAX_SEMAPHORE_HEADS = 16

# The fewest without a causal mask, also where L2 holds one: 1 to 2 % faster at
# 16,384 tokens, as fewer key tiles of a head start together.
_LEAST_SEMAPHORE_HEADS = 2

# sm90/backward_dq_writers.cuh's DQ_INTERVAL: key tiles of a head that start
# together begin to add that many iterations after one another.
_SEMAPHORE_INTERVAL = 2


def _most_semaphore_heads(problem: Problem, tile: Tile, device: Device) -> int:
    """The most concurrent heads of a deterministic call.

    Of so many heads few key tiles start together: the last one waits for as
    many iterations as it has.
    """
    if _is_wide(tile):
        return MAX_SEMAPHORE_HEADS
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    iterations = problem.group_size * q_tiles
    least = _SEMAPHORE_INTERVAL * device.num_sms // iterations
    return max(MAX_SEMAPHORE_HEADS, least)


def _backward_head_dims(problem: Problem, tile: Tile) -> tuple[int, int]:
    """`head_dims`, with head_dim raised to at least head_dim_v."""
    d, dv = head_dims(problem)
    if _is_wide(tile):  # whole panels
        d, dv = max(d, _PANEL_COLUMNS), max(dv, _PANEL_COLUMNS)
    return max(d, dv), dv


def _rows_bytes(problem: Problem, tile: Tile) -> int:
    words = problem.segment_ids + has_integer_dq(problem)  # ids, grids
    words += has_lse_rests(problem)
    return tile.block_q * (_ROW_BYTES + 4 * words) + _ROWS_BYTES


def _is_wide(tile: Tile) -> bool:
    """Whether a tile is for sm90/backward_wide.cu.

    Its warpgroups share the same 64 keys, and each computes one gradient.
    """
    return tile.block_k == 64


def _is_plain(problem: Problem) -> bool:
    """Without options that act on pairs or tiles."""
    return acts(problem) <= {"rows"}


# Blocks of a cluster, each with a key tile of a pair; one's columns of dQ.
_CLUSTER_BLOCKS, _CLUSTER_HEAD_DIM = 2, 256


def _in_clusters(problem: Problem, tile: Tile) -> bool:
    """Whether a tile is for sm90/backward_cluster.cu: no options, at 256."""
    return (
        _is_wide(tile)
        and tile.num_stages == 2
        and head_dims(problem) == (_CLUSTER_HEAD_DIM, _CLUSTER_HEAD_DIM)
        and _is_plain(problem)
        and not is_packed(problem)
    )


def _cluster_shared(problem: Problem, tile: Tile) -> int:
    """Bytes of sm90/backward_cluster.cu's SharedPlan."""
    columns = tile_bytes(64, _CLUSTER_HEAD_DIM)
    # k, v, half of the other block's k; q and dout; dS^T of both blocks
    tiles = 2 * columns + columns // 2 + 2 * tile.num_stages * columns
    tiles += 2 * tile_bytes(tile.block_k, tile.block_q)
    # q and dout; ds; k and v; work
    barriers = 4 * tile.num_stages + 3 + 4 + 3 * 2
    barriers += 2 * tile.num_stages if problem.deterministic else 0
    return round_up(
        tiles
        + tile.num_stages * _rows_bytes(problem, tile)
        + 2 * round_up(_WORK_BYTES - 8, 16)
        + barriers * MBARRIER_BYTES,
        1024,
    )


def _double_buffered_k(problem: Problem, tile: Tile) -> bool:
    """DOUBLE_BUFFERED_K of sm90/backward_shared.cuh.

    Where key tiles have few iterations, and without options where shared
    memory has room for it and it was no slower: at head_dim up to 64.
    """
    if not {"window", "segment_ids", "mask_mod"}.isdisjoint(problem.options):
        return True
    return _is_plain(problem) and tile.block_q > 64 and tile.num_stages == 2


def _dq_parts(tile: Tile, head_dim: int) -> int:
    """Parts of a query tile's dQ, each of which is summed in order.

    Of its rows or columns, a consumer warpgroup's each; of a wide tile, 128
    columns at a time, or all: DQ_PARTS of sm90/backward_wide.cu.
    """
    if not _is_wide(tile):
        return (tile.num_warps - 4) // 4
    return head_dim // 128 if head_dim % 128 == 0 else 1


# Consumer warps of sm90/backward.cu, each with the sums of 16 keys.
_CONSUMER_WARPS = 8

# In iterations, as measured: what a part costs apart from its own, and a part
# for each one before it that runs at the same time, whose sums it waits for.
_PART_COST, _HANDOVER_COST = 5, 4

# Iterations of a part of a group, with which that costs 8 %.
_PART_ITERATIONS = 64

# Each number is a kernel of its own. Of equally good ones the first is taken.
_TAIL_PARTS = (1, 5, 3, 2)


def _may_have_parts(problem: Problem, tile: Tile) -> bool:
    """Whether a work tile may have a part of a key tile's iterations."""
    return (
        _is_plain(problem)
        and not _is_wide(tile)
        and not problem.deterministic
        and not is_packed(problem)
    )


def _tail_parts(problem: Problem, device: Device, tile: Tile) -> int:
    """TAIL_PARTS of sm90/backward_scheduler.cuh: what takes least time."""
    if problem.causal or not _may_have_parts(problem, tile):
        return 1
    rest = key_tiles(problem, tile.block_k) % device.num_sms
    iterations = problem.group_size * count_tiles(
        problem, problem.seqlen_q, tile.block_q
    )

    def cost(parts: int) -> int:
        rounds = ceil_div(rest * parts, device.num_sms)
        of_part = ceil_div(iterations, parts) + _PART_COST
        together = min(parts, device.num_sms // max(rest, 1))
        waits = together * (together - 1) // 2
        return rounds * of_part + waits * _HANDOVER_COST

    return min((x for x in _TAIL_PARTS if x <= iterations), key=cost)


def _group_parts(problem: Problem, device: Device, tile: Tile) -> int:
    """GROUP_PARTS of sm90/backward_scheduler.cuh.

    More than 1 where the groups that are visited at a time do not fit in L2.
    Many short heads, of which parts would not fit either, are innermost.
    """
    if not (problem.causal and _may_have_parts(problem, tile)):
        return 1
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    groups = min(
        device.num_sms / k_tiles + 1, problem.batch * problem.num_heads_kv
    )
    bytes_of_heads = groups * _head_bytes(problem, tile)
    group = problem.group_size
    if group * bytes_of_heads <= device.l2_bytes:
        return 1
    # Of a mean key tile and head, with as many queries as keys.
    visits = count_tiles(problem, problem.seqlen_q, tile.block_q) // 2 + 1
    heads = next(
        x
        for x in range(1, group + 1)
        if group % x == 0 and (x * visits >= _PART_ITERATIONS or x == group)
    )
    fits = heads * bytes_of_heads <= 2 * device.l2_bytes
    return group // heads if fits or not heads_innermost(problem) else 1


def _head_bytes(problem: Problem, tile: Tile) -> int:
    """Bytes of a query head: q and dout have 2 an element, sums of dq 4."""
    d, dv = _backward_head_dims(problem, tile)
    visible_queries = int(min(window_of(problem), problem.seqlen_q))
    return visible_queries * (6 * d + 2 * dv)


def _backward_shared(
    problem: Problem, tile: Tile, *, has_parts: bool = True,
    owned: bool = False,
) -> int:  # fmt: skip
    """has_parts: that it has them, where it may. owned: as of `owns_dq`."""
    if _in_clusters(problem, tile):
        return _cluster_shared(problem, tile)
    d, dv = _backward_head_dims(problem, tile)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    queries = tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    ds = 2 * tile_bytes(tile.block_k, tile.block_q)
    dq = tile.block_q * d * 4
    barriers = 4 * tile.num_stages + 3 + 2 * 2  # q and dout; k, v; work
    work = 3 * 4 + (_SEQUENCE_BYTES if is_packed(problem) else 0)
    work += 3 * 4 * (has_parts and _may_have_parts(problem, tile))
    if not _is_wide(tile):
        barriers += 2 * 2  # ds
        if _double_buffered_k(problem, tile):
            keys += tile_bytes(tile.block_k, d)
            barriers += 3
        if owned:
            barriers += _dq_parts(tile, d)
    else:
        ds *= tile.num_stages  # and p; dq is added from registers
        dq = 0
        barriers += 2 * tile.num_stages
        if problem.deterministic and not has_integer_dq(problem):
            barriers += 2 * tile.num_stages * _dq_parts(tile, d)
    return round_up(
        keys
        + tile.num_stages * (queries + _rows_bytes(problem, tile))
        + ds
        + dq
        + barriers * MBARRIER_BYTES
        + 2 * work
        # has_boundary
        + 4 * (tile.num_stages if skips_tiles(problem) else 1),
        1024,
    )


def _backward_fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _backward_head_dims(problem, tile)
    if _is_wide(tile):
        return True  # it distributes registers by head_dim
    if tile.block_q == 64 and d != tile.block_k:
        return False  # a warpgroup computes all 64 rows, and 64 columns, of dq
    if tile.block_q > 64 and d > 64:
        return False  # or 64 rows, and all columns
    needs_p = _bends(problem) or "drops" in acts(problem)
    if tile.block_q > 64 and (needs_p or scores_twice(problem)):
        return False  # no registers for derivatives, or for P and kept P
    scores = tile.block_q * 5 // 4 if tile.block_q <= 64 else tile.block_q
    return (d + dv) // 2 + scores <= _BACKWARD_REGISTERS


# Query heads a key head, of heads up to 128 columns wide and of wider ones,
# from which on HEADS_INNERMOST is faster: L2 does not hold them all. With
# fewer it is 1 to 5 % slower (docs/lab/sm90_backward.md).
_MANY_HEADS, _MANY_WIDE_HEADS = 16, 8

# The largest head dimension of sm90/backward.cu; wider ones have others.
_MAX_OF_NARROW = 128

# Tiles of a block in the last section, of wide heads that are innermost or in
# order: of a smaller section more blocks work on the same head at a time.
_LAST_WIDE_TILES = 1


def heads_innermost(problem: Problem) -> bool:
    """HEADS_INNERMOST of sm90/backward_scheduler.cuh.

    A window's key tiles are seen by as many queries each, so blocks stay
    beside each other anyway.
    """
    is_wide = max(problem.head_dim, problem.head_dim_v) > _MAX_OF_NARROW
    many = _MANY_WIDE_HEADS if is_wide else _MANY_HEADS
    in_order = problem.deterministic and not has_integer_dq(problem)
    return (
        problem.causal
        and problem.group_size >= many
        and "window" not in problem.options
        and not in_order
        and not skips_tiles(problem)
    )


# OWNED_DQ. The most of L2 that Q, dO and sums of dQ of all blocks' heads may
# take, of which half are in use on average under the causal mask. And the
# least share of all SMs' time that whole heads keep busy.
_OWNED_OF_L2, _OWNED_BUSY = 0.9, 0.8


def owns_dq(problem: Problem, device: Device, tile: Tile) -> bool:
    """OWNED_DQ of sm90/backward_scheduler.cuh: a block has a head's key tiles.

    Every query tile sees the first key tile, and no two iterations in
    succession visit the same query tile. Measured to be faster where L2 holds
    the heads in progress (docs/lab/sm90_short_backward.md).
    """
    heads = problem.batch * problem.num_heads_kv
    rounds = ceil_div(heads, device.num_sms)
    d, dv = _backward_head_dims(problem, tile)
    of_head = problem.seqlen_q * (6 * d + 2 * dv) // (1 + problem.causal)
    in_progress = min(heads, device.num_sms) * of_head
    return (
        not problem.options
        and not _is_wide(tile)
        and problem.group_size == 1
        and (
            problem.seqlen_q > tile.block_q or problem.seqlen_k <= tile.block_k
        )
        and not (problem.causal and problem.seqlen_q > problem.seqlen_k)
        and heads >= _OWNED_BUSY * rounds * device.num_sms
        and in_progress <= _OWNED_OF_L2 * device.l2_bytes
    )


def rows_kernel(
    problem: Problem, tile: Tile, name: str, head_dim: int,
    *own: Constant, options: tuple[str, ...],
) -> KernelPlan:  # fmt: skip
    """The kernel that prepares row statistics; it depends on `options`."""
    lanes = min(ceil_div(problem.head_dim_v, 8), 32)
    return row_kernel(
        f"prepare/{name}.cu",
        f"{problem.direction}_rows",
        ("Element", problem.dtype),
        ("HEAD_DIM", head_dim),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        *own,
        ("DLSE", problem.dlse),
        ("LANES", 1 << (lanes - 1).bit_length()),
        *some_options(problem, "sm90", *options),
    )


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = _backward_head_dims(problem, tile)
    owned = owns_dq(problem, device, tile)
    parts = 1 if owned else _group_parts(problem, device, tile)
    tail_parts = 1 if owned else _tail_parts(problem, device, tile)
    has_parts = max(parts, tail_parts) > 1
    shared = _backward_shared(problem, tile, has_parts=has_parts, owned=owned)
    part_semaphores = _CONSUMER_WARPS if has_parts else 0
    wide = "_wide" if _is_wide(tile) else ""
    in_clusters = _in_clusters(problem, tile)
    together = _CLUSTER_BLOCKS if in_clusters else 1
    of_narrow = () if wide else (
        ("DOUBLE_BUFFERED_K", _double_buffered_k(problem, tile)),
        ("PART_SEMAPHORES", part_semaphores),
    )  # fmt: skip
    of_cluster = (("CLUSTER_BLOCKS", together),) if in_clusters else ()
    # Warps that compute dq. Wide: one warpgroup loads, two have dv and dk.
    dq_warps = 4 if _is_wide(tile) else tile.num_warps - 4
    integers = has_integer_dq(problem)
    in_order = problem.deterministic and not (integers or owned)
    innermost = heads_innermost(problem) and not has_parts
    semaphores = _dq_parts(tile, d) if in_order else 0
    rows = rows_kernel(
        problem, tile, "row_stats", d,
        ("DQ_COLUMNS", 0 if owned else d),
        ("DQ_SEMAPHORES", semaphores),
        ("PART_SEMAPHORES", part_semaphores),
        ("INTEGER_DQ", integers),
        ("CAUSAL", integers and problem.causal),
        options=(
            *("SOFTCAP", "ALIBI", "BIAS", "SCORE_MOD", "SEGMENTS"),
            *(("WINDOW", "DROPOUT") if integers else ()),
        ),
    )  # fmt: skip
    main = kernel_of(
        problem, tile, "sm90", (d, dv), shared,
        ("NUM_WARPS", dq_warps),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("DQ_SEMAPHORES", semaphores),
        ("INTEGER_DQ", integers),
        ("HEADS_INNERMOST", innermost),
        ("OWNED_DQ", owned),
        ("GROUP_PARTS", parts),
        ("TAIL_PARTS", tail_parts),
        ("STAGES", tile.num_stages),
        ("SCORE_BENDS", score_bends(problem)),
        ("SCORES_TWICE", scores_twice(problem)),
        ("MASK_BITS", count_mask_words(problem, tile) > 0),
        *of_narrow,
        *of_cluster,
        part="_cluster" if in_clusters else wide,
        ptxas_level=tile.ptxas_level,
    )  # fmt: skip
    q_tiles = query_tiles(problem, tile.block_q)
    kv_pairs = problem.batch * problem.num_heads_kv
    k_tiles_of_head = count_tiles(problem, problem.seqlen_k, tile.block_k)
    k_tiles = k_tiles_of_head * kv_pairs
    heads = heads_per_section(
        problem,
        device,
        problem.num_heads_kv * parts,
        problem.group_size // parts * _head_bytes(problem, tile),
    )
    if skips_tiles(problem):
        heads = _ordered_heads(problem, problem.num_heads_kv, heads)
    if in_order:
        heads = min(heads, _most_semaphore_heads(problem, tile, device))
        if not problem.causal:
            heads = min(max(heads, _LEAST_SEMAPHORE_HEADS), kv_pairs)
    is_short = wide and (innermost or (in_order and not in_clusters))
    last_tiles = _LAST_WIDE_TILES if is_short else LAST_TILES
    # Of clusters, and of the pairs that they take.
    running = max(device.num_sms // together, 1)
    tiles_of_head = ceil_div(k_tiles_of_head, together)
    works = tiles_of_head * kv_pairs * max(parts, tail_parts)
    blocks = together * min(kv_pairs if owned else works, running)
    last = last_section(
        problem, heads, kv_pairs * parts, tiles_of_head, running,
        of_block=last_tiles,
    )  # fmt: skip
    sum_tiles = q_tiles // kv_pairs * blocks if owned else q_tiles
    sums = sum_tiles * tile.block_q * d * (1 + integers)
    with_parts = k_tiles if parts > 1 else k_tiles % device.num_sms
    if has_parts:  # of dk and dv
        sums += with_parts * tile.block_k * (d + dv)
    bytes_of_rows = q_tiles * _rows_bytes(problem, tile)
    if integers:
        bytes_of_rows += k_tiles * _KEY_MAXIMA_BYTES
    is_masked = problem.causal or bool(acts(problem) & {"tiles", "pairs"})
    if owned:
        finish = _recompute_launches(problem, device, tile, (d, dv))
    else:
        finish = (
            rounding_launch(
                problem,
                replace(tile, block_k=together * tile.block_k),
                "sm90",
                (d, dv),
                q_tiles + (tiles_of_head * kv_pairs if is_masked else 0),
                dq_warps,
                recomputes=is_masked,
                semaphores=semaphores,
                integers=integers,
            ),
        )
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *option_launches(problem, tile, "sm90"),
            *_maxima_launches(problem, tile, (d, dv), k_tiles),
            *lse_rest_launches(problem, "sm90"),
            Launch(rows, q_tiles),
            Launch(main, blocks),
            *finish,
            *gradients_of_rows(problem, tile, "sm90", integers),
        ),  # fmt: skip
        heads_per_section=heads,
        last_section=last,
        workspace=(
            *buffers_of_options(problem, tile, k_tiles_of_head),
            *lse_rest_buffers(problem),
            Buffer("delta", 16, bytes_of_rows // 16),
            Buffer("dq_sum", 4, sums),
            Buffer("tile_counter", 4, 1),
            Buffer("recompute_flags", 4, k_tiles * (1 + part_semaphores)),
            Buffer("dq_semaphores", 4, q_tiles * semaphores),
        ),
    )


def _recompute_launches(
    problem: Problem, device: Device, tile: Tile, head_dims: tuple[int, int]
) -> tuple[Launch, ...]:
    """OWNED_DQ: recomputes rows that a masked NaN may have reached."""
    if not problem.causal:
        return ()
    kernel = row_kernel(
        "finish/recompute.cu",
        "backward_recompute",
        ("Element", problem.dtype),
        ("HEAD_DIM", head_dims[0]),
        ("HEAD_DIM_V", head_dims[1]),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        *option_constants(problem, "sm90", reads_dlse=True),
        ("CAUSAL", True),
        ("DLSE", problem.dlse),
        ("DQ_SEMAPHORES", 0),
    )
    heads = problem.batch * problem.num_heads_kv
    return (recompute_launch(kernel, heads, device),)


def _maxima_launches(
    problem: Problem, tile: Tile, head_dims: tuple[int, int], k_tiles: int
) -> tuple[Launch, ...]:
    """Maxima of K and V, from which the grids of integer sums follow."""
    if not has_integer_dq(problem):
        return ()
    chunks = ceil_div(max(problem.head_dim, problem.head_dim_v), 8)
    # Lanes per row, enough that every thread has a row.
    lanes = max(1 << (chunks - 1).bit_length(), ROW_THREADS // tile.block_k)
    kernel = row_kernel(
        "prepare/key_maxima.cu",
        "backward_key_maxima",
        ("Element", problem.dtype),
        ("HEAD_DIM", head_dims[0]),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("INTEGER_DQ", True),
        ("LANES", lanes),
        *some_options(
            problem, "sm90", "SEGMENTS", "ALIBI", "BIAS", "SCORE_MOD"
        ),
        shared_bytes=ROW_THREADS // 32 * _KEY_MAXIMA_BYTES,
    )
    return (Launch(kernel, k_tiles),)


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
BACKWARD = Maker(_backward, _backward_shared, _backward_fits)
