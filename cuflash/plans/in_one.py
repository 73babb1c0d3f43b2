"""Plans of one main kernel, with what prepares for it and finishes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cuflash.plans.tiles import Tile
from cuflash.plans.workspace import Buffer
from cuflash.request.problem import Problem

from .kernel import Constant, Device, Launch, Plan
from .record import FAMILIES, FamilyName
from .steps import (
    count_tiles,
    delta_buffers,
    delta_launch,
    direction_groups,
    element_bytes,
    gradients_of_rows,
    lse_rest_buffers,
    lse_rest_launches,
    main_kernel,
    num_directions,
    option_buffers,
    option_launches,
    query_tiles,
    rounding_launch,
    sections,
    semaphore_buffers,
)


def forward_in_one(
    problem: Problem,
    device: Device,
    tile: Tile,
    family: FamilyName,
    head_dims: tuple[int, int],
    shared: int,
    *own: Constant,
) -> Plan:
    """One kernel, one block per query tile; `own` are its own constants."""
    kernel = main_kernel(problem, tile, family, head_dims, shared, *own)
    tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    pairs = problem.batch * problem.num_heads_q
    columns = sum(head_dims)  # of k and v
    bytes_of_keys = problem.seqlen_k * columns * element_bytes(problem)
    return Plan(
        problem,
        family,
        tile,
        (
            *option_launches(problem, tile, family),
            Launch(kernel, tiles * pairs),
        ),
        workspace=option_buffers(problem, tile),
        **sections(
            problem, device, kernel, problem.num_heads_q,
            bytes_of_keys // problem.group_size, pairs, tiles,
        ),
    )  # fmt: skip


def jvp_in_one(
    problem: Problem,
    device: Device,
    tile: Tile,
    family: FamilyName,
    head_dims: tuple[int, int],
    shared: Callable[[Problem, Tile], int],
    *own: Constant,
    after_forward: bool = False,
) -> Plan:
    """A block per query tile and group of directions.

    `shared` tells bytes of a block; `own` are the kernel's own constants.
    `after_forward`: as of `Plan`; such a kernel has no groups.
    """
    tiles = count_tiles(problem, problem.seqlen_q, tile.block_q)
    heads = problem.batch * problem.num_heads_q
    launches = []
    for group in direction_groups(problem, tile):
        of_group = replace(tile, directions=group.directions)
        kernel = main_kernel(
            problem, tile, family, head_dims, shared(problem, of_group),
            *own, *(() if after_forward else group.constants),
        )  # fmt: skip
        launches.append(Launch(kernel, tiles * heads * group.groups))
    # Columns of k, v and their tangents.
    columns = (1 + tile.directions) * sum(head_dims)
    bytes_of_keys = problem.seqlen_k * columns * element_bytes(problem)
    rests = lse_rest_launches(problem, family) if after_forward else ()
    buffers = lse_rest_buffers(problem) if after_forward else ()
    return Plan(
        problem,
        family,
        tile,
        (*option_launches(problem, tile, family), *rests, *launches),
        workspace=(*option_buffers(problem, tile), *buffers),
        **sections(
            problem,
            device,
            launches[0].kernel,
            problem.num_heads_q,
            bytes_of_keys // problem.group_size,
            heads * (num_directions(problem) // tile.directions),
            tiles,
        ),
        after_forward=after_forward,
    )


def gradients_in_one(
    problem: Problem,
    device: Device,
    tile: Tile,
    family: FamilyName,
    head_dims: tuple[int, int],
    shared: int,
    *own: Constant,
    part: str = "",
) -> Plan:
    """The delta kernel, then the main one: a backward or a double backward.

    `own` are the main kernel's own constants, `part` the end of its name if a
    family has another one. It has one block per key tile. It adds to dq, or
    d2q, itself, or to float32 sums, which another kernel rounds.
    """
    main = main_kernel(
        problem, tile, family, head_dims, shared, *own,
        ("DETERMINISTIC", problem.deterministic),
        # How warps share the matmuls.
        ("SCORE_WARPS_Q", tile.score_warps_q),
        ("GRADIENT_WARPS_K", tile.gradient_warps_k),
        part=part,
    )  # fmt: skip
    if part:
        main = replace(main, entry=problem.direction + part)
    d, dv = head_dims
    q_tiles = query_tiles(problem, tile.block_q)
    k_tiles = count_tiles(problem, problem.seqlen_k, tile.block_k)
    pairs = problem.batch * problem.num_heads_kv
    size = element_bytes(problem)
    inputs = d + dv if problem.tangents is None else 2 * d + dv
    adds_to_dq = FAMILIES[family].adds_to_dq
    bytes_of_row = size * inputs + d * (size if adds_to_dq else 4)
    sums: tuple[Buffer, ...] = ()
    rounded: tuple[Launch, ...] = ()
    if not adds_to_dq:
        sums = (Buffer("dq_sum", 4, q_tiles * tile.block_q * d),)
        rounded = (
            rounding_launch(
                problem, tile, family, head_dims, q_tiles, tile.num_warps
            ),
        )
    return Plan(
        problem,
        family,
        tile,
        (
            *option_launches(problem, tile, family),
            *lse_rest_launches(problem, family),
            delta_launch(
                problem, family, tile.block_q, 0 if adds_to_dq else d
            ),
            Launch(main, k_tiles * pairs),
            *rounded,
            *gradients_of_rows(problem, tile, family),
        ),
        **sections(
            problem,
            device,
            main,
            problem.num_heads_kv,
            problem.group_size * problem.seqlen_q * bytes_of_row,
            pairs,
            k_tiles,
        ),
        workspace=(
            *option_buffers(problem, tile),
            *lse_rest_buffers(problem),
            *delta_buffers(problem),
            *sums,
            *semaphore_buffers(problem, q_tiles),
        ),
    )
