"""Plans of Hopper's backward kernels up to head_dim 256."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.options import acts
from cuflash.request.problem import Problem

from .kernel import Constant, Device, KernelPlan, Launch, Maker, Plan
from .rounding import ceil_div, round_up
from .simt_derivatives import recompute_launch
from .sm90 import (
    MBARRIER_BYTES,
    PANEL_COLUMNS,
    SEQUENCE_BYTES,
    WORK_BYTES,
    bends,
    buffers_of_options,
    has_integer_dq,
    head_dims,
    ordered_heads,
    score_bends,
    scores_twice,
)
from .steps import (
    LAST_TILES,
    ROW_THREADS,
    count_mask_words,
    count_tiles,
    gradients_of_rows,
    has_lse_rests,
    heads_per_section,
    is_packed,
    kernel_of,
    key_tiles,
    last_section,
    lse_rest_buffers,
    lse_rest_launches,
    option_constants,
    option_launches,
    query_tiles,
    rounding_launch,
    row_kernel,
    skips_tiles,
    some_options,
    tile_bytes,
    window_of,
)

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


def _most_semaphore_heads(form: _Form) -> int:
    """The most concurrent heads of a deterministic call.

    Of so many heads few key tiles start together: the last one waits for as
    many iterations as it has.
    """
    if _is_wide(form.tile):
        return MAX_SEMAPHORE_HEADS
    problem = form.problem
    q_tiles = count_tiles(problem, problem.seqlen_q, form.tile.block_q)
    iterations = problem.group_size * q_tiles
    least = _SEMAPHORE_INTERVAL * form.device.num_sms // max(iterations, 1)
    return max(MAX_SEMAPHORE_HEADS, least)


def _head_dims(problem: Problem, tile: Tile) -> tuple[int, int]:
    """`head_dims`, with head_dim raised to at least head_dim_v."""
    d, dv = head_dims(problem)
    if _is_wide(tile):  # whole panels
        d, dv = max(d, PANEL_COLUMNS), max(dv, PANEL_COLUMNS)
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
    """Whether a tile is for sm90/backward_cluster.cu: no options, at 256.

    Of a single key tile a cluster's second block would work on no keys.
    """
    return (
        _is_wide(tile)
        and tile.num_stages == 2
        and count_tiles(problem, problem.seqlen_k, tile.block_k) > 1
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
        + 2 * round_up(WORK_BYTES - 8, 16)
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
    q_tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    iterations = max(problem.group_size * q_tiles, 1)

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
    d, dv = _head_dims(problem, tile)
    visible_queries = int(min(window_of(problem), problem.seqlen_q))
    return visible_queries * (6 * d + 2 * dv)


def _shared(
    problem: Problem, tile: Tile, *, has_parts: bool = True,
    owned: bool = False,
) -> int:  # fmt: skip
    """has_parts: that it has them, where it may. owned: as of `owns_dq`."""
    if _in_clusters(problem, tile):
        return _cluster_shared(problem, tile)
    d, dv = _head_dims(problem, tile)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    queries = tile_bytes(tile.block_q, d) + tile_bytes(tile.block_q, dv)
    ds = 2 * tile_bytes(tile.block_k, tile.block_q)
    dq = tile.block_q * d * 4
    barriers = 4 * tile.num_stages + 3 + 2 * 2  # q and dout; k, v; work
    work = 3 * 4 + (SEQUENCE_BYTES if is_packed(problem) else 0)
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


def _fits(problem: Problem, tile: Tile) -> bool:
    d, dv = _head_dims(problem, tile)
    if _is_wide(tile):
        return True  # it distributes registers by head_dim
    if tile.block_q == 64 and d != tile.block_k:
        return False  # a warpgroup computes all 64 rows, and 64 columns, of dq
    if tile.block_q > 64 and d > 64:
        return False  # or 64 rows, and all columns
    needs_p = bends(problem) or "drops" in acts(problem)
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
    the heads in progress, with as many keys as queries
    (docs/lab/sm90_short_backward.md): beside more keys dQ is a smaller part,
    and the causal mask hides fewer of them.
    """
    heads = problem.batch * problem.num_heads_kv
    rounds = ceil_div(heads, device.num_sms)
    of_head = _head_bytes(problem, tile) // (1 + problem.causal)
    in_progress = min(heads, device.num_sms) * of_head
    return (
        not problem.options
        and not _is_wide(tile)
        and problem.group_size == 1
        and (
            problem.seqlen_q > tile.block_q or problem.seqlen_k <= tile.block_k
        )
        and problem.seqlen_k <= round_up(problem.seqlen_q, tile.block_k)
        and not (problem.causal and problem.seqlen_q > problem.seqlen_k)
        and heads >= max(_OWNED_BUSY * rounds * device.num_sms, 1)
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


@dataclass(frozen=True)
class _Form:
    """How a call's key tiles are divided among blocks, and dq is summed.

    Attributes
    ----------
    d, dv : int
        Head dimensions that the kernels compute with.
    owned : bool
        As of `owns_dq`.
    group_parts, tail_parts : int
        Parts of a key tile.
    in_order, integers : bool
        How a deterministic dq is summed, unless it is owned.
    in_clusters : bool
        As of `_in_clusters`.
    """

    problem: Problem
    device: Device
    tile: Tile
    d: int
    dv: int
    owned: bool
    group_parts: int
    tail_parts: int
    in_order: bool
    integers: bool
    in_clusters: bool

    @property
    def has_parts(self) -> bool:
        return max(self.group_parts, self.tail_parts) > 1

    @property
    def part_semaphores(self) -> int:
        return _CONSUMER_WARPS if self.has_parts else 0

    @property
    def semaphores(self) -> int:
        return _dq_parts(self.tile, self.d) if self.in_order else 0

    @property
    def innermost(self) -> bool:
        return heads_innermost(self.problem) and not self.has_parts

    @property
    def blocks(self) -> int:
        """Blocks that visit the same queries, each with its own keys."""
        return _CLUSTER_BLOCKS if self.in_clusters else 1

    @property
    def dq_warps(self) -> int:
        """Warps that compute dq; wide: a warpgroup, two have dv and dk."""
        return 4 if _is_wide(self.tile) else self.tile.num_warps - 4

    @property
    def kv_pairs(self) -> int:
        return self.problem.batch * self.problem.num_heads_kv

    @property
    def k_tiles_of_head(self) -> int:
        return count_tiles(
            self.problem, self.problem.seqlen_k, self.tile.block_k
        )

    @property
    def k_tiles(self) -> int:
        return key_tiles(self.problem, self.tile.block_k)

    @property
    def q_tiles(self) -> int:
        return query_tiles(self.problem, self.tile.block_q)

    @property
    def works_of_head(self) -> int:
        """What a block, or a cluster of them, takes at a time."""
        return ceil_div(self.k_tiles_of_head, self.blocks)

    @property
    def running(self) -> int:
        """Blocks, or clusters of them, that run at a time."""
        return max(self.device.num_sms // self.blocks, 1)

    @property
    def grid(self) -> int:
        """Blocks of the main kernel."""
        parts = max(self.group_parts, self.tail_parts)
        works = 1 if self.owned else self.works_of_head * parts
        return self.blocks * min(works * self.kv_pairs, self.running)


def _form_of(problem: Problem, device: Device, tile: Tile) -> _Form:
    d, dv = _head_dims(problem, tile)
    owned = owns_dq(problem, device, tile)
    integers = has_integer_dq(problem)
    return _Form(
        problem, device, tile, d, dv, owned,
        1 if owned else _group_parts(problem, device, tile),
        1 if owned else _tail_parts(problem, device, tile),
        problem.deterministic and not (integers or owned),
        integers,
        _in_clusters(problem, tile),
    )  # fmt: skip


def _backward(problem: Problem, device: Device, tile: Tile) -> Plan:
    form = _form_of(problem, device, tile)
    heads = _heads_of_section(form)
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *option_launches(problem, tile, "sm90"),
            *_maxima_launches(form),
            *lse_rest_launches(problem, "sm90"),
            Launch(_row_stats(form), form.q_tiles),
            Launch(_main_kernel(form), form.grid),
            *_finishing_launches(form),
            *gradients_of_rows(problem, tile, "sm90", form.integers),
        ),  # fmt: skip
        heads_per_section=heads,
        last_section=_last_section(form, heads),
        workspace=_workspace(form),
    )


def _row_stats(form: _Form) -> KernelPlan:
    problem = form.problem
    return rows_kernel(
        problem, form.tile, "row_stats", form.d,
        ("DQ_COLUMNS", 0 if form.owned else form.d),
        ("DQ_SEMAPHORES", form.semaphores),
        ("PART_SEMAPHORES", form.part_semaphores),
        ("INTEGER_DQ", form.integers),
        ("CAUSAL", form.integers and problem.causal),
        options=(
            *("SOFTCAP", "ALIBI", "BIAS", "SCORE_MOD", "SEGMENTS"),
            *(("WINDOW", "DROPOUT") if form.integers else ()),
        ),
    )  # fmt: skip


def _main_kernel(form: _Form) -> KernelPlan:
    problem, tile = form.problem, form.tile
    wide = "_wide" if _is_wide(tile) else ""
    shared = _shared(problem, tile, has_parts=form.has_parts, owned=form.owned)
    of_narrow = () if wide else (
        ("DOUBLE_BUFFERED_K", _double_buffered_k(problem, tile)),
        ("PART_SEMAPHORES", form.part_semaphores),
    )  # fmt: skip
    of_cluster = (("CLUSTER_BLOCKS", form.blocks),) if form.in_clusters else ()
    return kernel_of(
        problem, tile, "sm90", (form.d, form.dv), shared,
        ("NUM_WARPS", form.dq_warps),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("DQ_SEMAPHORES", form.semaphores),
        ("INTEGER_DQ", form.integers),
        ("HEADS_INNERMOST", form.innermost),
        ("OWNED_DQ", form.owned),
        ("GROUP_PARTS", form.group_parts),
        ("TAIL_PARTS", form.tail_parts),
        ("STAGES", tile.num_stages),
        ("SCORE_BENDS", score_bends(problem)),
        ("SCORE_WARPGROUPS", 1),
        ("SCORES_TWICE", scores_twice(problem)),
        ("MASK_BITS", count_mask_words(problem, tile) > 0),
        *of_narrow,
        *of_cluster,
        part="_cluster" if form.in_clusters else wide,
        ptxas_level=tile.ptxas_level,
    )  # fmt: skip


def _heads_of_section(form: _Form) -> int:
    problem = form.problem
    heads = heads_per_section(
        problem,
        form.device,
        problem.num_heads_kv * form.group_parts,
        problem.group_size
        // form.group_parts
        * _head_bytes(problem, form.tile),
    )
    if skips_tiles(problem):
        heads = ordered_heads(problem, problem.num_heads_kv, heads)
    if form.in_order:
        heads = min(heads, _most_semaphore_heads(form))
        if not problem.causal:
            heads = min(max(heads, _LEAST_SEMAPHORE_HEADS), form.kv_pairs)
    return heads


def _last_section(form: _Form, heads: int) -> int:
    is_short = _is_wide(form.tile) and (
        form.innermost or (form.in_order and not form.in_clusters)
    )
    return last_section(
        form.problem,
        heads,
        form.kv_pairs * form.group_parts,
        form.works_of_head,
        form.running,
        of_block=_LAST_WIDE_TILES if is_short else LAST_TILES,
    )


def _finishing_launches(form: _Form) -> tuple[Launch, ...]:
    """Rounds the sums of dq; recomputes rows that a NaN may have reached."""
    problem, tile = form.problem, form.tile
    if form.owned:
        return _recompute_launches(form)
    is_masked = problem.causal or bool(acts(problem) & {"tiles", "pairs"})
    flags = form.works_of_head * form.kv_pairs if is_masked else 0
    launch = rounding_launch(
        problem,
        replace(tile, block_k=form.blocks * tile.block_k),
        "sm90",
        (form.d, form.dv),
        form.q_tiles + flags,
        form.dq_warps,
        recomputes=is_masked,
        semaphores=form.semaphores,
        integers=form.integers,
    )
    return (launch,)


def _workspace(form: _Form) -> tuple[Buffer, ...]:
    problem, tile = form.problem, form.tile
    k_tiles, q_tiles = form.k_tiles, form.q_tiles
    sum_tiles = q_tiles
    if form.owned:  # of a block's head
        sum_tiles = q_tiles // form.kv_pairs * form.grid
    sums = sum_tiles * tile.block_q * form.d * (1 + form.integers)
    if form.has_parts:  # of dk and dv
        rest = k_tiles % form.device.num_sms
        with_parts = k_tiles if form.group_parts > 1 else rest
        sums += with_parts * tile.block_k * (form.d + form.dv)
    bytes_of_rows = q_tiles * _rows_bytes(problem, tile)
    if form.integers:
        bytes_of_rows += k_tiles * _KEY_MAXIMA_BYTES
    flags = k_tiles * (1 + form.part_semaphores)
    return (
        *buffers_of_options(problem, tile, form.k_tiles_of_head),
        *lse_rest_buffers(problem),
        Buffer("delta", 16, bytes_of_rows // 16),
        Buffer("dq_sum", 4, sums),
        Buffer("tile_counter", 4, 1),
        Buffer("recompute_flags", 4, flags),
        Buffer("dq_semaphores", 4, q_tiles * form.semaphores),
    )


def _recompute_launches(form: _Form) -> tuple[Launch, ...]:
    """OWNED_DQ: recomputes rows that a masked NaN may have reached."""
    problem, tile = form.problem, form.tile
    if not problem.causal:
        return ()
    kernel = row_kernel(
        "finish/recompute.cu",
        "backward_recompute",
        ("Element", problem.dtype),
        ("HEAD_DIM", form.d),
        ("HEAD_DIM_V", form.dv),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        *option_constants(problem, "sm90", reads_dlse=True),
        ("CAUSAL", True),
        ("DLSE", problem.dlse),
        ("DQ_SEMAPHORES", 0),
    )
    return (recompute_launch(kernel, form.kv_pairs, form.device),)


def _maxima_launches(form: _Form) -> tuple[Launch, ...]:
    """Maxima of K and V, from which the grids of integer sums follow."""
    problem, tile = form.problem, form.tile
    if not form.integers:
        return ()
    chunks = ceil_div(max(problem.head_dim, problem.head_dim_v), 8)
    # Lanes per row, enough that every thread has a row.
    lanes = max(1 << (chunks - 1).bit_length(), ROW_THREADS // tile.block_k)
    kernel = row_kernel(
        "prepare/key_maxima.cu",
        "backward_key_maxima",
        ("Element", problem.dtype),
        ("HEAD_DIM", form.d),
        ("BLOCK_Q", tile.block_q),
        ("BLOCK_K", tile.block_k),
        ("INTEGER_DQ", True),
        ("LANES", lanes),
        *some_options(
            problem, "sm90", "SEGMENTS", "ALIBI", "BIAS", "SCORE_MOD"
        ),
        shared_bytes=ROW_THREADS // 32 * _KEY_MAXIMA_BYTES,
    )
    return (Launch(kernel, form.k_tiles),)


BACKWARD = Maker(_backward, _shared, _fits)
