"""Which family of kernels runs a problem, and with which tiles it can.

The only module that knows families by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import cast

from cuflash import settings
from cuflash.errors import UnsupportedError
from cuflash.plans import (
    decode,
    decode_latent,
    decode_simt,
    decode_sm90,
    fma,
    fma_derivatives,
    mma8,
    mma8_derivatives,
    readout_gradients,
    readouts,
    simt,
    simt_derivatives,
    sm80,
    sm80_derivatives,
    sm90,
    sm90_backward,
    sm90_backward_passes,
    sm90_double_backward,
    sm90_forward_wide,
    sm90_jvp,
    tiles,
)
from cuflash.plans.kernel import Device, Maker, shared_bytes_of_block
from cuflash.plans.record import FamilyName
from cuflash.plans.steps import is_wide
from cuflash.plans.tiles import Tile
from cuflash.request import options
from cuflash.request.problem import Problem
from cuflash.request.readout import READOUT_GRADIENTS, READOUTS


def _readouts(family: FamilyName) -> dict[str, Maker]:
    return {
        **dict.fromkeys(READOUTS, readouts.maker_of(family)),
        **dict.fromkeys(READOUT_GRADIENTS, readout_gradients.maker_of(family)),
    }


def _makers(
    family: FamilyName, queries: ModuleType, derivatives: ModuleType
) -> dict[str, Maker]:
    return {
        **_readouts(family),
        "forward": queries.FORWARD,
        "backward": queries.BACKWARD,
        "jvp": derivatives.JVP,
        "double_backward": derivatives.DOUBLE_BACKWARD,
    }


# What plans each direction's kernels of a family.
_MAKERS: dict[str, dict[str, Maker]] = {
    "sm90": {
        "forward": sm90.FORWARD,
        "backward": sm90_backward.BACKWARD,
        "jvp": sm90_jvp.JVP,
        "double_backward": sm90_double_backward.DOUBLE_BACKWARD,
    },
    "sm80": _makers("sm80", sm80, sm80_derivatives),
    "decode": dict.fromkeys(("forward", "kvcache"), decode.FORWARD),
    "decode_sm90": dict.fromkeys(("forward", "kvcache"), decode_sm90.FORWARD),
    "decode_simt": dict.fromkeys(("forward", "kvcache"), decode_simt.FORWARD),
    "fma": _makers("fma", fma, fma_derivatives),
    "mma8_float64": _makers("mma8_float64", mma8, mma8_derivatives),
    "mma8_float32": _makers("mma8_float32", mma8, mma8_derivatives),
    "simt": _makers("simt", simt, simt_derivatives),
}

# The families that split keys, the best first.
_DECODING: dict[FamilyName, ModuleType] = {
    "decode_sm90": decode_sm90,
    "decode": decode,
    "decode_simt": decode_simt,
}

# What plans sm90's kernels for head dimensions above 256.
_WIDE_PLANNERS = sm90_forward_wide, sm90_backward_passes
_WIDE_MAKERS = {
    "forward": sm90_forward_wide.FORWARD,
    "backward": sm90_backward_passes.BACKWARD,
}

# Whether sm90's kernels support a problem; `sm90.runs` in other directions.
_SM90_RUNS = {
    "jvp": sm90_jvp.runs,
    "double_backward": sm90_double_backward.runs,
}

# The families for derivatives of problems whose own one has no kernels.
_OLDER: dict[FamilyName, tuple[FamilyName, ...]] = {
    "sm90": ("sm80",),
    "mma8_float32": ("fma",),
}

OLDEST, OLDEST_FOR_TF32X3 = 75, 80  # compute capability


def family_of(
    problem: Problem, device: Device, wanted: FamilyName | None = None
) -> FamilyName:
    """The kernel family for a problem on a device."""
    check_splits(problem)
    family = _family_of(problem, device, wanted)
    options.check_order(problem)
    if problem.tangents is not None:
        return _derivative_family(problem, device, family)
    return family if _has_kernels(problem, family) else "simt"


def in_float32(
    problem: Problem, device: Device, wanted: FamilyName | None = None
) -> bool:
    """Whether a 16-bit call runs on copies in float32 (launch/widened.py).

    Where tensor cores lack its dtype: fma's register tiles take a fraction
    of the time of simt's kernels, which read 16 bits.
    """
    if not _has_sixteen_bits(problem) or device.multiplies(problem.dtype):
        return False
    sized = problem.block_q is not None or problem.block_k is not None
    if sized or wanted == "simt":
        return False
    wide = replace(problem, dtype="float32")
    return (
        family_of(problem, device, wanted) == "simt"
        and family_of(wide, device, wanted) == "fma"
    )


def with_capped_score(
    problem: Problem, device: Device, wanted: FamilyName | None = None
) -> Problem:
    """`sm90.with_capped_score` of it, where sm90 supports only that."""
    changed = sm90.with_capped_score(problem)
    if changed is problem:
        return problem
    found = (family_of(x, device, wanted) for x in (problem, changed))
    return changed if (*found,) == ("sm80", "sm90") else problem


def _derivative_family(
    problem: Problem, device: Device, family: FamilyName
) -> FamilyName:
    """That family, else an older one, which has such a tile for derivatives.

    Tangents double what a block holds, so fewer head dimensions fit. The
    requested block sizes may be those of simt alone.
    """
    for name in (family, *_OLDER.get(family, ())):
        legal = legal_tiles(problem, device, name)
        if any(has_sizes(tile, problem) for tile in legal):
            return name
    return "simt"


def maker_of(problem: Problem, family: str) -> Maker:
    """What plans a family's kernels for the problem's direction."""
    if family == "sm90" and sm90.has_wide_heads(problem):
        return _WIDE_MAKERS[problem.direction]
    if family == "decode_sm90" and decode_latent.runs(problem):
        return decode_latent.FORWARD
    return _MAKERS[family][problem.direction]


def _has_kernels(problem: Problem, family: str) -> bool:
    """Whether a family has kernels of the problem's direction."""
    return problem.direction in _MAKERS[family]


def _family_of(
    problem: Problem, device: Device, wanted: FamilyName | None
) -> FamilyName:
    if device.capability < OLDEST:
        raise UnsupportedError(
            f"{problem.dtype} needs a GPU of compute capability"
            f" {OLDEST / 10} or newer, this one has"
            f" {device.capability / 10} ({device.arch})"
        )
    if problem.precision:
        if device.capability < OLDEST_FOR_TF32X3:
            raise UnsupportedError(
                f"precision {problem.precision!r} needs a GPU of compute"
                f" capability {OLDEST_FOR_TF32X3 / 10} or newer, this one has"
                f" {device.capability / 10} ({device.arch}): leave it out"
            )
        if not is_wide(problem):
            return "mma8_float32"
        return _wide_family(problem, device, "mma8_float32")
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
    if _has_sixteen_bits(problem) and not device.multiplies(problem.dtype):
        return "simt"
    if is_wide(problem):
        return _wide_family(problem, device, wanted)
    if not _has_sixteen_bits(problem):
        has_tf32 = problem.dtype == "float32" and device.capability >= 80
        if wanted == "mma8_float32" and has_tf32:
            return "mma8_float32"
        if _fma_runs(problem, device):
            return "fma"
        if _mma8_runs(problem, device):
            return "mma8_float64"
        return "simt"
    has_sm90 = wanted != "sm80" and _has_kernels(problem, "sm90")
    by_sm90 = _SM90_RUNS.get(problem.direction, sm90.runs)
    if has_sm90 and by_sm90(problem, device):
        return "sm90"
    return "sm80"


def _wide_family(
    problem: Problem, device: Device, wanted: FamilyName | None
) -> FamilyName:
    """Few tiles fit: but for sm90, a family runs both directions or none."""
    has_16_bits = _has_sixteen_bits(problem)
    by_wgmma = any(x.runs(problem, device) for x in _WIDE_PLANNERS)
    if has_16_bits and by_wgmma and wanted != "sm80":
        return "sm90"
    families: tuple[FamilyName, ...] = ("mma8_float64",)
    if has_16_bits:
        families = ("sm80",)
    elif problem.dtype == "float32":
        families = ("fma",)
        if wanted == "mma8_float32":
            families = ("mma8_float32", "fma")
    for family in families:
        runs, directions = _WIDE[family]
        both = (
            replace(problem, direction=direction)
            for direction in ("forward", "backward")
        )
        if problem.direction in directions and all(
            runs(x, device) for x in (*both, problem)
        ):
            return family
    return "simt"


def _has_sixteen_bits(problem: Problem) -> bool:
    return problem.dtype in ("float16", "bfloat16")


def _decode_family(
    problem: Problem, device: Device, wanted: FamilyName | None
) -> FamilyName | None:
    """The decode kernel for a problem, if any.

    Without the wanted one, the first that pays or, of a call that only they
    can compute, the first that runs.
    """
    must_decode = problem.num_splits or problem.kvcache is not None
    families = list(_DECODING)
    if wanted in families:
        families = families[families.index(wanted) :]
    for family in families:
        module = _DECODING[family]
        if family == wanted:
            takes = True
        elif must_decode:
            takes = family != "decode_sm90" or (
                wanted in (None, "sm90") and decode_sm90.has_rows(problem)
            )
        else:
            takes = wanted is None and module.pays(problem, device)
        if takes and _decodes(problem, device, family):
            return family
    return None


def _decodes(problem: Problem, device: Device, family: FamilyName) -> bool:
    """Whether a decode kernel runs a problem, with shared memory for it."""
    return (
        _DECODING[family].runs(problem)
        and (family != "decode_sm90" or device.arch == "sm_90a")
        and (family != "decode" or device.multiplies(problem.dtype))
        and any(legal_tiles(problem, device, family))
    )


def _sm80_runs(problem: Problem, device: Device) -> bool:
    """Needs shared memory for some tile of wide heads."""
    return any(legal_tiles(problem, device, "sm80"))


def _fma_runs(problem: Problem, device: Device) -> bool:
    """Needs float32 and shared memory for some tile.

    On sm_75 for one of the requested sizes: where few fit, simt has others.
    """
    return problem.dtype == "float32" and any(
        has_sizes(tile, problem) or not device.copies_at_once
        for tile in legal_tiles(problem, device, "fma")
    )


def _mma8_runs(problem: Problem, device: Device) -> bool:
    """Needs float64, fast tensor cores and registers for some tile."""
    return (
        problem.dtype == "float64"
        and device.capability in mma8.CAPABILITIES
        and any(legal_tiles(problem, device, "mma8_float64"))
    )


def _tf32x3_runs(problem: Problem, device: Device) -> bool:
    """Needs float32, tensor cores and shared memory for some tile."""
    return (
        problem.dtype == "float32"
        and device.capability >= OLDEST_FOR_TF32X3
        and any(legal_tiles(problem, device, "mma8_float32"))
    )


_BOTH = ("forward", "backward")
_TANGENTS = ("jvp", "double_backward")

# Which of these have tiles for wide heads, and in which directions.
_WIDE: dict[FamilyName, tuple[Callable[..., bool], tuple[str, ...]]] = {
    "sm80": (_sm80_runs, (*_BOTH, *_TANGENTS)),
    "fma": (
        _fma_runs,
        (*_BOTH, *_TANGENTS, *READOUTS, *READOUT_GRADIENTS),
    ),
    "mma8_float64": (_mma8_runs, _BOTH),
    "mma8_float32": (_tf32x3_runs, _BOTH),
}


def check_splits(problem: Problem) -> None:
    """Raise UnsupportedError if no kernel splits the keys of such calls."""
    if problem.num_splits is None or problem.num_splits == 1:
        return
    if not decode_simt.runs(problem):
        raise UnsupportedError(
            f"num_splits is {problem.num_splits}: keys are split without"
            " packed sequences, precision, block_q and block_k; leave it out"
        )


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
    maker = maker_of(problem, family)
    for tile in tiles.candidates(family, problem.direction):
        if _fits(problem, device, family, tile, maker):
            yield tile


def _fits(
    problem: Problem, device: Device, family: str, tile: Tile, maker: Maker
) -> bool:
    if family == "decode" and device.copies_at_once != (tile.num_stages == 1):
        return False
    if family == "fma" and fma.is_small(tile) and not device.copies_at_once:
        return False
    most = shared_bytes_of_block(device, tile.blocks_per_sm)
    shared = maker.shared_bytes(problem, tile)
    return shared <= most and maker.fits(problem, tile)


def is_legal(
    problem: Problem, device: Device, family: str, tile: Tile
) -> bool:
    """Whether a family's kernel can run a problem with a tile."""
    known = tiles.is_known(family, problem.direction, tile)
    return known and _fits(
        problem, device, family, tile, maker_of(problem, family)
    )


def has_sizes(tile: Tile, problem: Problem) -> bool:
    """Whether a tile has the requested block sizes."""
    return problem.block_q in (None, tile.block_q) and problem.block_k in (
        None,
        tile.block_k,
    )
