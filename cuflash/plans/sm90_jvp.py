"""The plan of a JVP by wgmma: 16-bit types, on Hopper.

Without options but a user's score.
"""

from __future__ import annotations

from dataclasses import replace

from cuflash.expressions import nodes
from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem

from .expression import has_expression
from .kernel import Device, KernelPlan, Launch, Maker, Plan
from .rounding import ceil_div, round_up
from .simt_derivatives import jvp_kernel, recompute_launch
from .sm90 import MBARRIER_BYTES, head_dims, runs_derivatives
from .steps import (
    DirectionGroups,
    count_tiles,
    direction_groups,
    is_linear,
    kernel_of,
    num_directions,
    sections,
    tile_bytes,
)

# S, W and what they become, and the sums of O and O': up to so many of a
# thread's 240 registers, or of 160 where three warpgroups consume.
_REGISTERS = {128: 192, 192: 128}

_FLAG_ROWS = 16  # common/row_flags.cuh
_CONSUMER_ROWS = 64  # sm90/consumer_constants.cuh

# Of the kernel that computes the flagged rows.
_RECOMPUTE_TILE = Tile(32, 16, 4)


def runs(problem: Problem, device: Device) -> bool:
    """Whether the kernel supports the problem: no option but a user's score.

    A user's mask hides tiles, which it does not skip.
    """
    return runs_derivatives(problem, device, ("score_mod",))


def _shared(problem: Problem, tile: Tile) -> int:
    d, dv = head_dims(problem)
    keys = tile_bytes(tile.block_k, d) + tile_bytes(tile.block_k, dv)
    barriers = 1 + 4 * tile.num_stages
    return round_up(
        (1 + tile.directions) * tile_bytes(tile.block_q, d)
        + (1 + tile.directions) * tile.num_stages * keys
        + barriers * MBARRIER_BYTES,
        1024,
    )


# What a score may consist of without being slow.
_FAST = frozenset((
    "score", "add", "subtract", "multiply", "negative", "absolute",
    "minimum", "maximum", "where",
))  # fmt: skip


def _is_slow(problem: Problem) -> bool:
    """Whether a user's score has functions of the score, or divides by it.

    They take so long that a scheduler should have three warps, not two.
    """
    if problem.score_mod is None:
        return False
    return any(
        x.kind == "real" and "score" in x.depends and x.op not in _FAST
        and not (x.op == "divide" and "score" not in x.args[1].depends)
        for x in nodes.in_order([problem.score_mod])
    )  # fmt: skip


# Three consumers' tiles have so many rows more than two's at most: at 4,096
# queries they gain 1.06 to 1.11.
_MORE_ROWS = 1.05


def _fits(problem: Problem, tile: Tile) -> bool:
    _, dv = head_dims(problem)
    two = 2 * _CONSUMER_ROWS
    if tile.block_q > two:  # by three consumers
        rows, of_two = (
            round_up(problem.seqlen_q, x) for x in (tile.block_q, two)
        )
        if rows > _MORE_ROWS * of_two or not _is_slow(problem):
            return False
    if tile.directions > num_directions(problem):
        return False
    if has_expression(problem) and tile.directions > 1:
        return False  # slopes are not kept for the second
    used = tile.block_k + (1 + tile.directions) * dv // 2
    return used <= _REGISTERS.get(tile.block_q, 0)


def _kernel(
    problem: Problem, tile: Tile, group: DirectionGroups
) -> KernelPlan:
    shared = _shared(problem, replace(tile, directions=group.directions))
    return kernel_of(
        problem, tile, "sm90", head_dims(problem), shared,
        ("NEGATE_SCORES", problem.scale < 0 and is_linear(problem)),
        ("KV_STAGES", tile.num_stages),
        *group.constants,
    )  # fmt: skip


def _groups(problem: Problem, tile: Tile) -> tuple[DirectionGroups, ...]:
    """In pairs; else all but the first take five products, without O."""
    count = num_directions(problem)
    if tile.directions > 1 or count == 1:
        return direction_groups(problem, tile)
    return (
        DirectionGroups(1, 1, "first"),
        DirectionGroups(1, count - 1, "rest"),
    )


def _plan(problem: Problem, device: Device, tile: Tile) -> Plan:
    heads = problem.batch * problem.num_heads_q
    moving_heads = heads * num_directions(problem)
    tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    rows = count_tiles(problem, problem.seqlen_q, _RECOMPUTE_TILE.block_q)
    groups = num_directions(problem) // tile.directions
    columns = (1 + tile.directions) * sum(head_dims(problem))
    key_bytes = problem.seqlen_k * columns * 2 // problem.group_size
    flags = ceil_div(problem.seqlen_q, _FLAG_ROWS) * moving_heads
    launches = [
        Launch(_kernel(problem, tile, group), tiles * heads * group.groups)
        for group in _groups(problem, tile)
    ]
    return Plan(
        problem,
        "sm90",
        tile,
        (
            *launches,
            recompute_launch(
                jvp_kernel(problem, _RECOMPUTE_TILE, "sm90"),
                rows * moving_heads,
                device,
            ),
        ),
        **sections(
            problem,
            device,
            launches[0].kernel,
            problem.num_heads_q * groups,
            key_bytes,
            heads * groups,
            tiles,
        ),
        workspace=(Buffer("recompute_flags", 4, flags),),
    )


JVP = Maker(_plan, _shared, _fits)
