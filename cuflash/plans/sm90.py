"""Plans of the wgmma kernels: 16-bit types, on Hopper."""

from __future__ import annotations

from dataclasses import replace

from cuflash.expressions import builtin, derivative, nodes
from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request import softcap as softcaps
from cuflash.request.options import acts, has_order
from cuflash.request.problem import Problem

from . import sm90_key_parts
from .kernel import (
    Device,
    KernelPlan,
    Launch,
    Maker,
    Plan,
    StaticSchedule,
    shared_bytes_of_block,
)
from .rounding import ceil_div, round_up
from .steps import (
    count_mask_words,
    count_tiles,
    heads_per_section,
    is_linear,
    is_packed,
    is_wide,
    kernel_of,
    option_buffers,
    option_launches,
    run_tiles,
    skips_tiles,
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


MBARRIER_BYTES, WORK_BYTES = 8, 20

PANEL_COLUMNS = 64  # common/smem.cuh


# Larger head dimensions leave no shared memory for ALiBi's MMA.
_WIDEST_WITH_SLOPES = 192


SEQUENCE_BYTES = 6 * 4  # common/packed_sequences.cuh's Sequence


def head_dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions, rounded up to supported ones: see `runs`."""
    if has_wide_heads(problem):
        # Whole panels, at least one for each half of a result's columns.
        least = 2 * PANEL_COLUMNS
        d, dv = (
            max(round_up(x, PANEL_COLUMNS), least)
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
    panels = columns // PANEL_COLUMNS
    return PANEL_COLUMNS * (2 if panels % 2 == 0 else 1)


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


def _shared(
    problem: Problem, tile: Tile, q_stages: int, has_parts: bool = False
) -> int:
    d, dv = head_dims(problem)
    queries = tile_bytes(tile.block_q, max(d, dv))
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    barriers = 2 * q_stages + 4 * tile.num_stages  # full and empty: q; k, v
    return round_up(
        q_stages * queries
        + tile.num_stages * keys
        + small_bytes(problem, max(q_stages, 2), barriers)
        + max(q_stages, 2) * sm90_key_parts.WORK_BYTES * has_parts
        + (_biases_bytes(tile) if _has_staged_bias(problem) else 0)
        + (4 * tile.num_stages if _has_sparse_tiles(problem) else 4)
        + (_ids_bytes(tile) if problem.segment_ids else 0)
        + (_slopes_bytes(tile) if _has_alibi_mma(problem) else 0),
        1024,
    )


def small_bytes(problem: Problem, works: int, barriers: int) -> int:
    """Bytes of as many work tiles, with their barriers, and others."""
    work = WORK_BYTES + (SEQUENCE_BYTES if is_packed(problem) else 0)
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


def bends(problem: Problem) -> bool:
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
    return bends(problem) or any("score" in x.depends for x in needed)


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
    has_parts = sm90_key_parts.has_key_parts(
        problem, tile, device, max(head_dims(problem))
    )
    q_stages, shared = next(
        (stages, room)
        for stages in (3, 2, 1)
        if (room := _shared(problem, tile, stages, has_parts)) <= most
    )
    kernel = kernel_of(
        problem, tile, "sm90", head_dims(problem), shared,
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("Q_STAGES", q_stages),
        ("KV_STAGES", tile.num_stages),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("KEY_PARTS", has_parts),
        ("HAS_TAIL", _has_tail(problem, device, tile)),
        ("MASK_BITS", count_mask_words(problem, tile) > 0),
        run_tiles(problem, tile),
    )  # fmt: skip
    decided = forward_plan(problem, device, tile, kernel)
    if has_parts:
        return sm90_key_parts.with_key_parts(decided, device)
    return decided


def forward_plan(
    problem: Problem, device: Device, tile: Tile, kernel: KernelPlan
) -> Plan:
    """The plan of a forward kernel of this family."""
    num_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    items = heads * num_tiles
    is_dynamic = _has_dynamic_scheduler(problem)
    blocks = device.num_sms * tile.blocks_per_sm
    schedule = _static_schedule(num_tiles, heads, _has_pairs(problem), blocks)
    if dict(kernel.constants)["HAS_TAIL"]:
        schedule, blocks = _with_tail(schedule, num_tiles * heads, blocks)
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
    skipped, see `ordered_heads`.
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
        return ordered_heads(problem, problem.num_heads_q, fitting)
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


def ordered_heads(problem: Problem, heads: int, fitting: int) -> int:
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


def _has_pairs(problem: Problem) -> bool:
    """Whether the static scheduler's tiles differ so that they go in pairs."""
    return problem.causal and not (
        _has_dynamic_scheduler(problem) or _has_balanced_rounds(problem)
    )


# In iterations, as measured: what a query tile costs apart from its own, and
# one of the tail, since no other tile overlaps its start and its end. A tail
# is worth it if it saves so much of the time.
_TILE_COST, _TAIL_TILE_COST, _TAIL_GAIN = 1, 2, 0.015


def _has_tail(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether the last tiles get blocks of their own: TailScheduler.

    If in the last round of pairs many blocks would have none.
    """
    tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    blocks = device.num_sms * tile.blocks_per_sm
    pairs = heads * (tiles // 2)
    if not _has_pairs(problem) or pairs < blocks:
        return False
    # In pairs: of the block that has most, and of a mean block.
    rounds = ceil_div(pairs, blocks)
    singles = ceil_div(heads * ceil_div(tiles, 2), blocks) - rounds
    longest, mean = rounds + singles / 2, heads * tiles / 2 / blocks
    of_pair = _iterations_of_pair(problem, tile) + 2 * _TILE_COST
    tail = heads * tiles / blocks - 2 * (pairs // blocks - 1)
    saved = (longest - mean) * of_pair - tail * _TAIL_TILE_COST
    return saved >= _TAIL_GAIN * longest * of_pair


def _iterations_of_pair(problem: Problem, tile: Tile) -> float:
    """Key tiles of a pair of query tiles, under the causal mask."""
    q, k = problem.seqlen_q, problem.seqlen_k
    keys = k - q / 2 if k >= q else k * k / (2 * q)  # of a mean query
    return 2 * keys / tile.block_k


def _with_tail(
    schedule: StaticSchedule, tiles: int, blocks: int
) -> tuple[StaticSchedule, int]:
    """The schedule with a tail of these tiles, and the number of blocks.

    The tail has more than one pair's work per block, so that its short tiles
    fill what its long ones leave.
    """
    paired = (schedule.paired_items // blocks - 1) * blocks
    tail = tiles - 2 * paired
    items = schedule._replace(paired_items=paired, items=paired + tail)
    return items, tail + (blocks if paired else 0)


def has_integer_dq(problem: Problem) -> bool:
    """Whether the sums of dQ are integers: sm90/integer_dq.cuh's INTEGER_DQ.

    Otherwise a deterministic dQ is summed in order, for which the key tiles
    that visit a query tile have to be consecutive.
    """
    in_order = has_order(problem, "sm90") and problem.mask_mod is None
    return problem.deterministic and not in_order


FORWARD = Maker(_forward, _forward_shared, _forward_fits)
