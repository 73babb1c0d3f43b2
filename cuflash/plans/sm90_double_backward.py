"""The plan of a double backward by wgmma: 16-bit types, on Hopper.

Without options but a user's score.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request import mod_tangents
from cuflash.request.problem import Problem

from .kernel import EVEN_SECTIONS, Device, KernelPlan, Launch, Maker, Plan
from .rounding import round_up
from .simt_derivatives import double_backward_kernels, recompute_launch
from .sm90 import (
    MBARRIER_BYTES,
    head_dims,
    runs_derivatives,
    score_bends,
)
from .sm90_backward import MAX_SEMAPHORE_HEADS, heads_innermost, rows_kernel
from .steps import (
    count_tiles,
    delta_buffers,
    has_lse_rests,
    heads_per_section,
    kernel_of,
    key_tiles,
    last_section,
    lse_rest_buffers,
    lse_rest_launches,
    query_tiles,
    rounding_launch,
    tile_bytes,
)

# sm90/second_rows.cuh: four statistics of a row, four numbers of a tile.
_ROW_BYTES, _ROWS_BYTES = 4 * 4, 16

_WORK_BYTES = 3 * 4  # of a work tile

_QUERY_WARPS = 4  # that compute d2q
_WIDEST_OF_TWO = 64  # head, for two warpgroups of a user's scores
_WARPGROUP = 128

# Of the kernels that compute the flagged tiles.
_RECOMPUTE_TILE = Tile(16, 32, 4), Tile(32, 16, 4)


def runs(problem: Problem, device: Device) -> bool:
    """Whether the kernel supports the problem: no option but a user's score.

    A user's mask hides tiles, which it does not skip. What the score reads
    has no second gradient and does not move.
    """
    # It stores rows of d2k and d2q 16 bytes at a time, too.
    return (
        runs_derivatives(problem, device, ("score_mod",))
        and problem.tangents is not None
        and not mod_tangents.slots_of(problem.tangents.of)
        and not problem.return_dmod
        and problem.head_dim % 8 == 0
    )


def _rows_bytes(problem: Problem, tile: Tile) -> int:
    rest = 4 if has_lse_rests(problem) else 0
    return tile.block_q * (_ROW_BYTES + rest) + _ROWS_BYTES


def _shared_of(problem: Problem, tile: Tile, q_stages: int) -> int:
    d, dv = head_dims(problem)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    q = tile_bytes(tile.block_q, d)
    others = q + tile_bytes(tile.block_q, dv)  # ddq and dout
    weights = 3 * tile_bytes(tile.block_k, tile.block_q)
    # q; ddq, dout and weights; k and v; work
    barriers = 2 * q_stages + 8 * tile.num_stages + 3 + 2 * 2
    return round_up(
        2 * keys
        + q_stages * q
        + tile.num_stages * (others + weights + _rows_bytes(problem, tile))
        + barriers * MBARRIER_BYTES
        + 2 * _WORK_BYTES,
        1024,
    )


def _shared(problem: Problem, tile: Tile) -> int:
    """With as few stages of Q as of the other tiles."""
    return _shared_of(problem, tile, tile.num_stages)


def _fits(problem: Problem, tile: Tile) -> bool:
    return True  # registers do for all its head dimensions


def _score_warpgroups(problem: Problem) -> int:
    """How many warpgroups compute scores.

    A user's score takes so many instructions that all others wait for it.
    Wide heads take longer: two warpgroups read K and V twice.
    """
    wide = max(head_dims(problem)) > _WIDEST_OF_TWO
    return 1 if problem.score_mod is None or wide else 2


def _main(
    problem: Problem, device: Device, tile: Tile, semaphores: int
) -> KernelPlan:
    q_stages = tile.num_stages + 1
    if _shared_of(problem, tile, q_stages) > device.shared_bytes:
        q_stages = tile.num_stages
    shared = _shared_of(problem, tile, q_stages)
    warpgroups = _score_warpgroups(problem)
    kernel = kernel_of(
        problem, tile, "sm90", head_dims(problem), shared,
        ("NUM_WARPS", _QUERY_WARPS),
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("DQ_SEMAPHORES", semaphores),
        ("INTEGER_DQ", False),
        ("OWNED_DQ", False),
        ("HEADS_INNERMOST", heads_innermost(problem)),
        ("GROUP_PARTS", 1),
        ("TAIL_PARTS", 1),
        ("STAGES", tile.num_stages),
        ("Q_STAGES", q_stages),
        ("SCORE_BENDS", score_bends(problem)),
        ("SCORE_WARPGROUPS", warpgroups),
        ptxas_level=tile.ptxas_level,
    )  # fmt: skip
    more = (warpgroups - 1) * _WARPGROUP
    return replace(kernel, threads=kernel.threads + more)


def _recompute_launches(
    problem: Problem, device: Device
) -> tuple[Launch, ...]:
    """The kernels of flagged tiles; without masked pairs there are none."""
    if not problem.causal:
        return ()
    by_keys, by_queries = _RECOMPUTE_TILE
    of_keys, _ = double_backward_kernels(problem, by_keys, "sm90")
    _, of_queries = double_backward_kernels(problem, by_queries, "sm90")
    k_tiles = key_tiles(problem, by_keys.block_k)
    q_tiles = query_tiles(problem, by_queries.block_q)
    return (
        recompute_launch(of_keys, k_tiles, device),
        recompute_launch(of_queries, q_tiles, device),
    )


def _plan(problem: Problem, device: Device, tile: Tile) -> Plan:
    d, dv = head_dims(problem)
    semaphores = 1 if problem.deterministic else 0
    rows = rows_kernel(
        problem, tile, "second_rows", d,
        ("DQ_SEMAPHORES", semaphores), ("INTEGER_DQ", False),
        options=("SCORE_MOD",),
    )  # fmt: skip
    q_tiles = query_tiles(problem, tile.block_q)
    tiles_of_head = count_tiles(problem, problem.seqlen_k, tile.block_k)
    kv_pairs = problem.batch * problem.num_heads_kv
    k_tiles = tiles_of_head * kv_pairs
    # q, its cotangent and dout have 2 bytes per element, the sums of dq 4.
    shared_by_head = problem.group_size * problem.seqlen_q * (8 * d + 2 * dv)
    heads = heads_per_section(
        problem, device, problem.num_heads_kv, shared_by_head
    )
    if problem.deterministic:
        heads = min(heads, MAX_SEMAPHORE_HEADS)
        last = EVEN_SECTIONS
    else:
        last = last_section(
            problem, heads, kv_pairs, tiles_of_head, device.num_sms
        )
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *lse_rest_launches(problem, "sm90"),
            Launch(rows, q_tiles),
            Launch(
                _main(problem, device, tile, semaphores),
                min(k_tiles, device.num_sms),
            ),
            rounding_launch(
                problem, tile, "sm90", (d, dv), q_tiles, _QUERY_WARPS
            ),
            *_recompute_launches(problem, device),
        ),
        heads_per_section=heads,
        last_section=last,
        workspace=(
            *lse_rest_buffers(problem),
            *delta_buffers(problem),
            Buffer("query_rows", _rows_bytes(problem, tile), q_tiles),
            Buffer("dq_sum", 4, q_tiles * tile.block_q * d),
            Buffer("tile_counter", 4, 1),
            Buffer("recompute_flags", 4, k_tiles + q_tiles),
            Buffer("dq_semaphores", 4, q_tiles * semaphores),
        ),
    )


DOUBLE_BACKWARD = Maker(_plan, _shared, _fits)
