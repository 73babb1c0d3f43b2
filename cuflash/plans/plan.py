"""The dispatcher: `plan` turns a `Problem` and a `Device` into a `Plan`.

It chooses the tile, as `family` does the family; the families' modules have
the constants, grids, shared memory and registers of their kernels. Pure
Python: no array library, no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.plans import expression, nearest_tiles, tiles
from cuflash.plans.family import (
    OLDEST,
    OLDEST_FOR_TF32X3,
    check_splits,
    family_of,
    has_sizes,
    in_float32,
    is_legal,
    legal_tiles,
    maker_of,
    wanted_family,
    with_capped_score,
)
from cuflash.plans.kernel import (
    SHARED_KIB,
    Device,
    KernelPlan,
    Launch,
    Plan,
    StaticSchedule,
    device_of_arch,
    occupancy,
)
from cuflash.plans.nearest_tiles import ROWS_OF_A_TILE
from cuflash.plans.record import FAMILIES, FamilyName
from cuflash.plans.rotary import rotary_plan
from cuflash.plans.rounding import ceil_div
from cuflash.plans.steps import merge_plan, skips_tiles, window_of
from cuflash.plans.tiles import Tile
from cuflash.request import options
from cuflash.request.problem import Problem

__all__ = [
    "OLDEST", "SHARED_KIB", "Device", "FamilyName", "KernelPlan", "Launch",
    "Plan", "StaticSchedule",
    "check", "default_plans", "device_of_arch", "family_of", "in_float32",
    "is_legal", "legal_tiles", "main_file", "occupancy", "plan", "tuned_by",
    "wanted_family", "with_capped_score",
]  # fmt: skip


def main_file(family: str, file: str) -> bool:
    """Whether a kernel's file belongs to a family's folder."""
    return file.startswith(f"{FAMILIES[family].folder}/")


@functools.lru_cache(maxsize=4096)
def plan(
    problem: Problem,
    device: Device,
    family: FamilyName | None = None,
    tile: Tile | None = None,
) -> Plan:
    """Decide how a device runs a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
    family : str, optional
        Use this family if it supports the problem, else the best one.
    tile : Tile, optional
        Use exactly this tile.

    Raises
    ------
    UnsupportedError
        If the device is too old for the problem's dtype, or has too little
        shared memory for its head dimensions.
    ValueRangeError
        If no kernel supports the requested block sizes (the message lists
        the supported ones) or the tile.
    """
    if problem.direction == "merge":
        return merge_plan(problem)
    if problem.direction == "rotary":
        family_of(problem, device, "simt")  # raises if the device is too old
        return rotary_plan(problem)
    family = family_of(problem, device, family)
    if tile is None:
        tile = _choose_tile(problem, device, family)
    elif not is_legal(problem, device, family, tile):
        raise ValueRangeError(
            f"{tile} cannot be run by the {family} {problem.direction}"
            f" kernel on {device.arch}"
        )
    maker = maker_of(problem, family)
    return expression.with_text(maker.plan(problem, device, tile))


@functools.lru_cache(maxsize=4096)
def check(problem: Problem) -> None:
    """Raise the errors that a problem raises on every GPU.

    Calls on NumPy arrays use it, so that they fail where all GPUs do.

    Raises
    ------
    UnsupportedError
        If no GPU supports the problem.
    ValueRangeError
        If no kernel on any GPU supports the requested block sizes.
    """
    check_splits(problem)
    options.check_order(problem)
    if problem.block_q is problem.block_k is None:
        return
    legal = set()
    for device in _known_devices():
        if problem.precision and device.capability < OLDEST_FOR_TF32X3:
            continue
        family = family_of(problem, device)
        for tile in legal_tiles(problem, device, family):
            if has_sizes(tile, problem):
                return
            legal.add(tile)
    raise _no_such_blocks(problem, "any", "any GPU", legal)


def _known_devices() -> Iterator[Device]:
    for capability in SHARED_KIB:
        suffix = "a" if capability == 90 else ""
        yield device_of_arch(f"sm_{capability}{suffix}")


def _choose_tile(problem: Problem, device: Device, family: str) -> Tile:
    """The nearest tuned tile with the requested sizes, else a legal one."""
    seqlen, load = tuned_by(problem, device)
    # Most masks of users are causal, or as sparse.
    is_causal = problem.causal or problem.mask_mod is not None
    nearest = nearest_tiles.tuned(
        device.capability,
        family,
        problem.direction,
        problem.dtype,
        max(problem.head_dim, problem.head_dim_v),
        is_causal,
        _tuned_option(problem),
        seqlen,
        load,
        device.name,
        device.bandwidth,
        (*problem.options, *(["max_score"] * problem.return_max_score)),
    )
    if problem.tangents is not None:
        nearest = _several_directions_first(nearest)
    for tile in sorted(
        nearest, key=lambda tile: _is_too_large(problem, device, tile)
    ):
        if has_sizes(tile, problem) and is_legal(
            problem, device, family, tile
        ):
            return tile
    legal: Iterable[Tile] = legal_tiles(problem, device, family)
    if problem.tangents is not None:
        legal = _several_directions_first(tuple(legal))
    others = []
    for tile in legal:
        if has_sizes(tile, problem):
            return tile
        others.append(tile)
    if not others:
        raise _no_room(problem, device, family)
    raise _no_such_blocks(problem, f"the {family}", device.arch, others)


def _is_too_large(problem: Problem, device: Device, tile: Tile) -> bool:
    """Whether tiles of `ROWS_OF_A_TILE` rows would take far less time.

    Tables know lengths and the number of tiles, not how full a head's last
    one is, nor that few tiles of 192 rows occupy fewer SMs. Of calls for
    which a table has both sizes: without options or mask, and not of narrow
    heads.
    """
    p = problem
    wide = max(p.head_dim, p.head_dim_v) > 64
    if p.direction != "forward" or not wide or p.causal or p.options:
        return False

    def time(rows: int) -> float:
        count = ceil_div(p.seqlen_q, rows) * p.batch * p.num_heads_q
        return rows * max(count / device.num_sms, 1.0)

    return time(tile.block_q) > 1.2 * time(ROWS_OF_A_TILE)


def _several_directions_first(found: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The same tiles; first those whose blocks have several directions."""
    return tuple(sorted(found, key=lambda tile: -tile.directions))


def _no_such_blocks(
    problem: Problem, kernels: str, where: str, legal: Iterable[Tile]
) -> ValueRangeError:
    """The error for unsupported block sizes; it lists the supported ones.

    These depend on the options too, which use registers and shared memory.
    """
    sizes = sorted({(tile.block_q, tile.block_k) for tile in legal})
    p = problem
    given = " and ".join(", ".join(p.options).rsplit(", ", 1))
    return ValueRangeError(
        f"block_q {p.block_q}, block_k {p.block_k} cannot be run by {kernels}"
        f" {p.direction} kernel for head_dim {p.head_dim}, head_dim_v"
        f" {p.head_dim_v}, {p.dtype}{f' with {given}' if given else ''}"
        f" on {where}; these (block_q, block_k) can: "
        + ", ".join(map(str, sizes))
    )


def _no_room(
    problem: Problem, device: Device, family: str
) -> UnsupportedError:
    """The error for too little shared memory; it lists GPUs with enough."""
    maker = maker_of(problem, family)
    needed = min(
        maker.shared_bytes(problem, tile)
        for tile in tiles.candidates(family, problem.direction)
        if maker.fits(problem, tile)
    )
    elsewhere = [
        f"sm_{capability}"
        for capability, kib in SHARED_KIB.items()
        if kib * 1024 >= needed
    ]
    return UnsupportedError(
        f"the {problem.direction} pass with head_dim {problem.head_dim},"
        f" head_dim_v {problem.head_dim_v}, {problem.dtype} needs {needed}"
        " bytes of shared memory for its smallest tile, this GPU has"
        f" {device.shared_bytes} ({device.arch}); it would fit on"
        f" {', '.join(elsewhere)}"
    )


def tuned_by(problem: Problem, device: Device) -> tuple[float, float]:
    """The length and the load by which a tile is chosen.

    The length is the number of tokens that a block iterates over (keys in a
    forward pass, queries in a backward pass). The load is the number of tiles
    of `ROWS_OF_A_TILE` rows (queries forward, keys backward) per SM.

    The lengths of packed sequences are unknown, except for the longest if the
    user gives it. They are assumed to be equal, or one of that length and the
    others equal; the length is then that of the sequence that contains a
    (query, key) pair, averaged over pairs.
    """
    walked: float
    walked, longest, rows, heads = (
        (problem.seqlen_k, problem.max_seqlen_k,
         problem.seqlen_q, problem.num_heads_q)
        if problem.direction in ("forward", "jvp")
        else (problem.seqlen_q, problem.max_seqlen_q,
              problem.seqlen_k, problem.num_heads_kv)
    )  # fmt: skip
    if problem.num_sequences:
        walked = _length_of_pairs(walked, problem.num_sequences, longest)
    walked = min(walked, window_of(problem))
    count = ceil_div(rows, ROWS_OF_A_TILE) * problem.batch * heads
    return walked, count / device.num_sms


def _tuned_option(problem: Problem) -> str | None:
    """The one of `tiles.OPTIONS` that best describes a block's iterations.

    Tiles that a user's mask hides are skipped as those of segment ids are.
    """
    if window_of(problem) < problem.seqlen_k:
        return "window"
    return "segment_ids" if skips_tiles(problem) else None


def _length_of_pairs(total: int, count: int, longest: int | None) -> int:
    """The length of the sequence of a token pair, averaged over pairs."""
    if longest is None:
        return ceil_div(total, count)
    longest = min(longest, total)
    other = (total - longest) / max(count - 1, 1)
    pairs, other_pairs = longest**2, (total - longest) * other
    tokens = pairs * longest + other_pairs * other
    return round(tokens / max(pairs + other_pairs, 1))


def default_plans(device: Device) -> list[Plan]:
    """The plans compiled at import, which most calls need."""
    # Length and load determine the tile: 2048 tokens, and enough tiles to
    # fill any GPU.
    sizes = 8, 2048, 2048, 16, 16
    return [
        plan(Problem(direction, dtype, *sizes, d, d, d**-0.5, causal), device)
        for direction in ("forward", "backward")
        for dtype in ("float16", "bfloat16")
        if device.multiplies(dtype)
        for d in (64, 128)
        for causal in (False, True)
    ]
