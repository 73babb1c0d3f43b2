"""The dispatcher: `plan` turns a `Problem` and a `Device` into a `Plan`.

It chooses the kernel family and the tile; `cuflash.plans` has the constants,
grids, shared memory and registers of each family's kernels. Pure Python: no
array library, no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import cast

from cuflash import settings
from cuflash.errors import UnsupportedError, ValueRangeError
from cuflash.plans import (
    decode,
    decode_simt,
    fma,
    fma_derivatives,
    mma,
    mma8,
    mma8_derivatives,
    mma_derivatives,
    nearest_tiles,
    simt,
    simt_derivatives,
    tiles,
    wgmma,
    wgmma_double_backward,
    wgmma_jvp,
)
from cuflash.plans.family import FAMILIES, FamilyName
from cuflash.plans.kernel import (
    SHARED_KIB,
    Device,
    KernelPlan,
    Launch,
    Maker,
    Plan,
    StaticSchedule,
    device_of_arch,
    occupancy,
    shared_bytes_of_block,
)
from cuflash.plans.nearest_tiles import ROWS_OF_A_TILE
from cuflash.plans.rotary import rotary_plan
from cuflash.plans.rounding import ceil_div
from cuflash.plans.steps import (
    MAX_OF_TENSOR_CORES,
    merge_plan,
    window_of,
)
from cuflash.plans.tiles import Tile
from cuflash.request import options
from cuflash.request.problem import Problem

__all__ = [
    "SHARED_KIB", "Device", "FamilyName", "KernelPlan", "Launch", "Plan",
    "StaticSchedule",
    "check", "default_plans", "device_of_arch", "family_of", "is_legal",
    "legal_tiles", "main_file", "occupancy", "plan", "tuned_by",
    "wanted_family",
]  # fmt: skip

_MAKERS: dict[tuple[str, str], Maker] = {
    (family, direction): maker
    for family, module in {
        "wgmma": wgmma, "mma": mma, "fma": fma, "dmma": mma8, "tf32x3": mma8,
        "simt": simt,
    }.items()
    for direction, maker in (
        ("forward", module.FORWARD), ("backward", module.BACKWARD)
    )
} | {
    ("decode", "forward"): decode.FORWARD,
    ("decode", "kvcache"): decode.FORWARD,
    ("decode_simt", "forward"): decode_simt.FORWARD,
    ("decode_simt", "kvcache"): decode_simt.FORWARD,
    ("wgmma", "jvp"): wgmma_jvp.JVP,
    ("wgmma", "double_backward"): wgmma_double_backward.DOUBLE_BACKWARD,
    ("fma", "jvp"): fma_derivatives.JVP,
    ("fma", "double_backward"): fma_derivatives.DOUBLE_BACKWARD,
    ("mma", "jvp"): mma_derivatives.JVP,
    ("mma", "double_backward"): mma_derivatives.DOUBLE_BACKWARD,
    ("dmma", "jvp"): mma8_derivatives.JVP,
    ("tf32x3", "jvp"): mma8_derivatives.JVP,
    ("dmma", "double_backward"): mma8_derivatives.DOUBLE_BACKWARD,
    ("tf32x3", "double_backward"): mma8_derivatives.DOUBLE_BACKWARD,
    ("simt", "jvp"): simt_derivatives.JVP,
    ("simt", "double_backward"): simt_derivatives.DOUBLE_BACKWARD,
}  # fmt: skip


# Whether wgmma's kernels support a problem; `wgmma.runs` in other directions.
_WGMMA_RUNS = {
    "jvp": wgmma_jvp.runs,
    "double_backward": wgmma_double_backward.runs,
}

# The families for derivatives of problems whose own one has no kernels.
_OLDER: dict[FamilyName, tuple[FamilyName, ...]] = {
    "wgmma": ("mma",),
    "tf32x3": ("fma",),
}

_OLDEST_FOR_TF32X3 = 80  # compute capability


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
    maker = _MAKERS[family, problem.direction]
    return maker.plan(problem, device, tile)


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
    _check_precision(problem)
    _check_splits(problem)
    options.check_order(problem)
    if problem.block_q is problem.block_k is None:
        return
    legal = set()
    for device in _known_devices():
        if device.capability < _oldest(problem):
            continue
        if problem.precision and device.capability < _OLDEST_FOR_TF32X3:
            continue
        family = family_of(problem, device)
        for tile in legal_tiles(problem, device, family):
            if _has_sizes(tile, problem):
                return
            legal.add(tile)
    raise _no_such_blocks(problem, "any", "any GPU", legal)


def _known_devices() -> Iterator[Device]:
    for capability in SHARED_KIB:
        suffix = "a" if capability == 90 else ""
        yield device_of_arch(f"sm_{capability}{suffix}")


def _check_splits(problem: Problem) -> None:
    """Raise UnsupportedError if no kernel splits the keys of such calls."""
    if problem.num_splits is None or problem.num_splits == 1:
        return
    if not decode_simt.runs(problem):
        raise UnsupportedError(
            f"num_splits is {problem.num_splits}: keys are split without"
            " packed sequences, precision, block_q and block_k; leave it out"
        )


def _check_precision(problem: Problem) -> None:
    """Raise UnsupportedError if the head dimensions are too large."""
    if problem.precision and _is_wide(problem):
        raise UnsupportedError(
            f"precision {problem.precision!r} needs head_dim and"
            f" head_dim_v of at most {MAX_OF_TENSOR_CORES}, this call"
            f" has {problem.head_dim} and {problem.head_dim_v}: leave it"
            " out"
        )


def family_of(
    problem: Problem, device: Device, wanted: FamilyName | None = None
) -> FamilyName:
    """The kernel family for a problem on a device."""
    _check_splits(problem)
    family = _family_of(problem, device, wanted)
    options.check_order(problem)
    if problem.tangents is not None:
        return _derivative_family(problem, device, family)
    return family if _has_kernels(problem, family) else "simt"


def _derivative_family(
    problem: Problem, device: Device, family: FamilyName
) -> FamilyName:
    """That family, else an older one, which has such a tile for derivatives.

    Tangents double what a block holds, so fewer head dimensions fit. The
    requested block sizes may be those of simt alone.
    """
    for name in (family, *_OLDER.get(family, ())):
        legal = legal_tiles(problem, device, name)
        if any(_has_sizes(tile, problem) for tile in legal):
            return name
    return "simt"


def _has_kernels(problem: Problem, family: str) -> bool:
    """Whether a family has kernels of the problem's direction."""
    return (family, problem.direction) in _MAKERS


def _family_of(
    problem: Problem, device: Device, wanted: FamilyName | None
) -> FamilyName:
    needed = _oldest(problem)
    if device.capability < needed:
        raise UnsupportedError(
            f"{problem.dtype} needs a GPU of compute capability"
            f" {needed / 10} or newer, this one has"
            f" {device.capability / 10} ({device.arch})"
            + (
                "; float32 and float64 run from 7.5 on"
                if device.capability >= 75
                else ""
            )
        )
    if problem.precision:
        if device.capability < _OLDEST_FOR_TF32X3:
            raise UnsupportedError(
                f"precision {problem.precision!r} needs a GPU of compute"
                f" capability {_OLDEST_FOR_TF32X3 / 10} or newer, this one has"
                f" {device.capability / 10} ({device.arch}): leave it out"
            )
        _check_precision(problem)
        return "tf32x3"
    if wanted == "simt" and problem.kvcache is None:
        return "simt"
    decoding = _decode_family(problem, device, wanted)
    if decoding:
        return decoding
    if (problem.num_splits or 1) > 1:
        raise UnsupportedError(
            f"num_splits is {problem.num_splits}: {device.arch} has too little"
            " shared memory to split keys with head_dim"
            f" {problem.head_dim} and head_dim_v {problem.head_dim_v}; leave"
            " it out"
        )
    if _is_wide(problem):
        # Few tiles fit: use fma only if both directions have one.
        both = (
            replace(problem, direction=direction)
            for direction in ("forward", "backward")
        )
        runs = all(_fma_runs(each, device) for each in (*both, problem))
        return "fma" if runs else "simt"
    if not _has_sixteen_bits(problem):
        has_tf32 = problem.dtype == "float32" and device.capability >= 80
        if wanted == "tf32x3" and has_tf32:
            return "tf32x3"
        if _fma_runs(problem, device):
            return "fma"
        if _dmma_runs(problem, device):
            return "dmma"
        return "simt"
    has_wgmma = wanted != "mma" and _has_kernels(problem, "wgmma")
    by_wgmma = _WGMMA_RUNS.get(problem.direction, wgmma.runs)
    if has_wgmma and by_wgmma(problem, device):
        return "wgmma"
    return "mma"


def _has_sixteen_bits(problem: Problem) -> bool:
    return problem.dtype in ("float16", "bfloat16")


def _oldest(problem: Problem) -> int:
    """The oldest compute capability that supports the problem's dtype."""
    return 80 if _has_sixteen_bits(problem) else 75


def _is_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > MAX_OF_TENSOR_CORES


def _decode_family(
    problem: Problem, device: Device, wanted: FamilyName | None
) -> FamilyName | None:
    """The decode kernel for a problem, if any: decode/forward.cu first.

    Needs shared memory for some tile.
    """
    must_decode = problem.num_splits or problem.kvcache is not None
    modules: tuple[tuple[FamilyName, ModuleType], ...] = (
        ("decode", decode), ("decode_simt", decode_simt),
    )  # fmt: skip
    for family, module in modules:
        if (
            module.runs(problem)
            and (
                wanted == family
                or (must_decode and wanted != "decode_simt")
                or (wanted is None and module.pays(problem))
            )
            and any(legal_tiles(problem, device, family))
        ):
            return family
    return None


def _fma_runs(problem: Problem, device: Device) -> bool:
    """Needs float32, cp.async and shared memory for some tile."""
    return (
        problem.dtype == "float32"
        and device.capability >= 80
        and any(legal_tiles(problem, device, "fma"))
    )


def _dmma_runs(problem: Problem, device: Device) -> bool:
    """Needs float64, fast tensor cores and registers for some tile."""
    return (
        problem.dtype == "float64"
        and device.capability in mma8.CAPABILITIES
        and any(legal_tiles(problem, device, "dmma"))
    )


def main_file(family: str, file: str) -> bool:
    """Whether a kernel's file belongs to a family's folder."""
    return file.startswith(f"{FAMILIES[family].folder}/")


def wanted_family() -> FamilyName | None:
    """The family named by the environment variable ``CUFLASH_FAMILY``."""
    return cast("FamilyName | None", settings.read("CUFLASH_FAMILY"))


def legal_tiles(
    problem: Problem, device: Device, family: str
) -> Iterator[Tile]:
    """Every tile with which a family's kernel can run a problem.

    Larger tiles, which are usually faster, come first.
    """
    if not _has_kernels(problem, family):
        return
    for tile in tiles.candidates(family, problem.direction):
        if _fits(problem, device, family, tile):
            yield tile


def _fits(problem: Problem, device: Device, family: str, tile: Tile) -> bool:
    maker = _MAKERS[family, problem.direction]
    most = shared_bytes_of_block(device, tile.blocks_per_sm)
    shared = maker.shared_bytes(problem, tile)
    return shared <= most and maker.fits(problem, tile)


def is_legal(
    problem: Problem, device: Device, family: str, tile: Tile
) -> bool:
    """Whether a family's kernel can run a problem with a tile."""
    known = tiles.is_known(family, problem.direction, tile)
    return known and _fits(problem, device, family, tile)


def _choose_tile(problem: Problem, device: Device, family: str) -> Tile:
    """The nearest tuned tile with the requested sizes, else a legal one."""
    seqlen, load = tuned_by(problem, device)
    nearest = nearest_tiles.tuned(
        device.capability,
        family,
        problem.direction,
        problem.dtype,
        max(problem.head_dim, problem.head_dim_v),
        problem.causal,
        _tuned_option(problem),
        seqlen,
        load,
        device.name,
        device.bandwidth,
    )
    if problem.tangents is not None:
        nearest = _several_directions_first(nearest)
    for tile in nearest:
        if _has_sizes(tile, problem) and is_legal(
            problem, device, family, tile
        ):
            return tile
    legal = tuple(legal_tiles(problem, device, family))
    if not legal:
        raise _no_room(problem, device, family)
    if problem.tangents is not None:
        legal = _several_directions_first(legal)
    for tile in legal:
        if _has_sizes(tile, problem):
            return tile
    raise _no_such_blocks(problem, f"the {family}", device.arch, legal)


def _several_directions_first(found: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The same tiles; first those whose blocks have several directions."""
    return tuple(sorted(found, key=lambda tile: -tile.directions))


def _has_sizes(tile: Tile, problem: Problem) -> bool:
    """Whether a tile has the requested block sizes."""
    return problem.block_q in (None, tile.block_q) and problem.block_k in (
        None,
        tile.block_k,
    )


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
    maker = _MAKERS[family, problem.direction]
    needed = min(
        maker.shared_bytes(problem, tile)
        for tile in tiles.candidates(family, problem.direction)
        if maker.fits(problem, tile)
    )
    elsewhere = [
        f"sm_{capability}"
        for capability, kib in SHARED_KIB.items()
        if capability >= _oldest(problem) and kib * 1024 >= needed
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
    """The one of `tiles.OPTIONS` that best describes a block's iterations."""
    if window_of(problem) < problem.seqlen_k:
        return "window"
    return "segment_ids" if problem.segment_ids else None


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
    plans = []
    for direction in ("forward", "backward"):
        for dtype in ("float16", "bfloat16"):
            for head_dim in (64, 128):
                for causal in (False, True):
                    # Length and load determine the tile: 2048 tokens, and
                    # enough tiles to fill any GPU.
                    problem = Problem(
                        direction,
                        dtype,
                        8,
                        2048,
                        2048,
                        16,
                        16,
                        head_dim,
                        head_dim,
                        head_dim**-0.5,
                        causal,
                    )
                    if device.capability >= 80:
                        plans.append(plan(problem, device))
    return plans
