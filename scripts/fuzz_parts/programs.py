"""Draws programs: what a kernel is compiled for, from a seed.

Compiling takes a second for the emulator and several for a GPU, a launch
milliseconds. So what determines a kernel's text (dtype, head dimensions,
options, tile, architecture) is drawn once, as a `Program`, and problems.py
draws many problems that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.plans.tiles import Tile
from helpers import options
from helpers.data import Case, Emulation, short_repr
from strategies import HEAD_DIMS, PAGE_SIZES, tiles

# How often each is drawn: in proportion to these. Those that two passes or
# tangents make slow come less often.
DIRECTIONS = {
    "forward": 12,
    "backward": 9,
    "packed": 3,  # both directions, each sequence of its own length
    "forward_kvcache": 5,
    "jvp": 3,
    "double_backward": 2,
    "merge": 1,
}
DTYPES = {"float16": 3, "bfloat16": 3, "float32": 3, "float64": 2}
# Of the emulator: all families with options, then others' tiles and memory.
ARCHS = {
    "16": {
        "sm_75": 2,
        "sm_80": 4,
        "sm_90a": 5,
        "sm_86": 1,
        "sm_100": 1,
        "sm_120": 1,
    },  # fmt: skip
    "wide": {"sm_75": 3, "sm_80": 4, "sm_86": 1, "sm_90a": 2},
}
# Families to ask for (CUFLASH_FAMILY); None: the device's own.
FAMILIES = {
    "16": {
        None: 9,
        "simt": 1,
        "decode": 2,
        "decode_sm90": 2,
        "decode_simt": 1,
    },
    "wide": {None: 4, "simt": 1, "decode_simt": 1},
}
# A GPU has one architecture, and so has older families only if asked.
MMA_OF_GPU = {"sm80": 4}
OF_DECODING = ("decode", "decode_sm90", "decode_simt")
# Small heads are cheap to emulate; the others have other tiles and code.
FEW_HEAD_DIMS = (8, 16, 16, 32, 40, 64, 64)
WIDER_THAN_TENSOR_CORES = (264, 320)
SOFTCAPS = (1.0, 5.0, 11.5, 18.2, 30.0, 200.0, 3e4)
SCALES = (None, None, None, 0.25, -0.1, 0.0)
NUMBERS = {"window", "softcap", "dropout"}
# What packed sequences can have (options.TABLE, not_with).
PACKED = (
    "window", "softcap", "alibi_slopes", "alibi_slopes_of_batches", "sink",
    "dropout",
)  # fmt: skip
CACHED = PACKED[:-1]
MOVING = ("q", "k", "v", "bias", "sink")


@dataclass(frozen=True, repr=False)
class Program:
    """What problems share.

    direction : one of DIRECTIONS.
    case : dtype, head dimensions, scale, softcap, arrays, machine, tiles.
    family : that is asked for, or None.
    options : names of its options, causal among them.
    moving : inputs with tangents, of derivatives.
    dlse : whether backward has one.
    of_forward : whether backward has the kernels' own out and lse.
    group_size : of decoding, which has tiles for a few rows.
    decodes : whether its problems have few queries and many keys.
    bounded : which bounds of a window are there: left, right.
    cache : further fields of a KVCase.
    """

    seed: int
    direction: str
    case: Case
    family: str | None = None
    options: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    dlse: bool = False
    of_forward: bool = False
    group_size: int = 1
    decodes: bool = False
    bounded: tuple[bool, bool] = (True, True)
    cache: tuple[tuple[str, Any], ...] = ()

    __repr__ = short_repr


def pick(rng: np.random.Generator, weights: Any) -> Any:
    """Draw a key of a dict of weights, or an element of a sequence."""
    if isinstance(weights, dict):
        names, sizes = zip(*weights.items(), strict=True)
        return names[rng.choice(len(names), p=np.divide(sizes, sum(sizes)))]
    return weights[rng.integers(len(weights))]


def draw(seed: int, on_gpu: bool = False) -> Program:
    """Return the program of a seed, always the same one."""
    rng = np.random.default_rng(seed)
    direction, dtype = pick(rng, DIRECTIONS), pick(rng, DTYPES)
    kind = "16" if "16" in dtype else "wide"
    families = FAMILIES[kind]
    if on_gpu and kind == "16":
        families = families | MMA_OF_GPU
    family = _family(rng, direction, families)
    precision = None
    is_float32 = dtype == "float32" and family is None
    if is_float32 and direction not in ("forward_kvcache", "merge"):
        precision = pick(rng, (None, "tf32x3"))
    head_dim, head_dim_v = _head_dims(rng, precision, family)
    arch = pick(rng, ARCHS[kind])
    if precision or max(head_dim, head_dim_v) > 256:
        arch = "sm_80" if arch == "sm_75" else arch
    names = _options(rng, direction)
    case = Case(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal="causal" in names,
        scale=pick(rng, SCALES),
        softcap=pick(rng, SOFTCAPS) if "softcap" in names else None,
        # A broadcast bias has its gradient summed in no fixed order.
        deterministic=bool(rng.random() < 0.4) and "bias" not in names,
        precision=precision,
        arrays_of=tuple(sorted(set(names) & set(options.MAKERS))),
        on=Emulation(
            arch,
            # Few SMs, so that a persistent block takes several tiles.
            num_sms=pick(rng, (1, 2, 3, None)),
            # A small L2, so that there are several sections of heads.
            l2_bytes=pick(rng, (None, 1, 1 << 18)),
            family=family,
        ),
    )
    if not on_gpu and family is None and rng.random() < 0.5:
        case = _with_tiles(rng, case, direction)
    return Program(
        seed,
        direction,
        case,
        family,
        tuple(sorted(names)),
        _moving(rng, names),
        dlse=bool(rng.random() < 0.2),
        of_forward=bool(rng.random() < 0.3),
        group_size=int(pick(rng, (1, 2, 5, 8))),
        decodes=direction == "forward"
        and (family in OF_DECODING or bool(rng.random() < 0.05)),
        bounded=pick(rng, ((True, True), (True, False), (False, True))),
        cache=_cache(rng, dtype, head_dim)
        if direction == "forward_kvcache"
        else (),
    )


def _family(
    rng: np.random.Generator, direction: str, families: dict[str | None, int]
) -> str | None:
    family = pick(rng, families)
    if direction == "forward_kvcache":
        return pick(rng, (None, "decode_simt"))
    if family in OF_DECODING and direction != "forward":
        return None
    return family


def _head_dims(
    rng: np.random.Generator, precision: str | None, family: str | None
) -> tuple[int, int]:
    """Draw head_dim and head_dim_v: mostly the same, mostly small."""

    def one() -> int:
        chance = rng.random()
        if chance < 0.75:
            return int(pick(rng, FEW_HEAD_DIMS))
        if chance < 0.9:
            return int(pick(rng, HEAD_DIMS))
        return int(rng.integers(1, 257))

    if precision is None and family != "decode" and rng.random() < 0.04:
        return int(pick(rng, WIDER_THAN_TENSOR_CORES)), one()
    head_dim = one()
    return head_dim, head_dim if rng.random() < 0.7 else one()


def _options(rng: np.random.Generator, direction: str) -> set[str]:
    """Draw the names of options: none, one, some or all."""
    if direction == "merge":
        return set()
    known = {
        "packed": PACKED, "forward_kvcache": CACHED,
    }.get(direction, (*options.MAKERS, *NUMBERS))  # fmt: skip
    count = pick(rng, (0, 1, 1, 1, 2, 3, int(rng.integers(len(known) + 1))))
    count = min(count, len(known))
    names = options.completed([*map(str, rng.permutation(known)[:count])])
    if "alibi_slopes_of_batches" in names:
        names -= {"alibi_slopes"}
    if rng.random() < 0.4:
        names |= {"causal"}
    return names - {"seed"}


def _with_tiles(rng: np.random.Generator, case: Case, direction: str) -> Case:
    """Give it one of the tiles that its kernels can have."""
    if direction not in ("forward", "backward", "packed"):
        return case
    chosen: dict[str, Tile] = {}
    for name in ("forward", "backward"):
        legal = tiles(case, name, case.on.arch)
        if legal:
            chosen[f"{name}_tile"] = pick(rng, legal)
    return replace(case, on=replace(case.on, **chosen))


def _moving(rng: np.random.Generator, names: set[str]) -> tuple[str, ...]:
    """Draw which inputs have tangents: at least one."""
    there = [x for x in MOVING if x in "qkv" or x in names]
    count = pick(rng, (len(there), int(rng.integers(1, len(there) + 1))))
    return tuple(sorted(map(str, rng.permutation(there)[:count])))


def _cache(
    rng: np.random.Generator, dtype: str, head_dim: int
) -> tuple[tuple[str, Any], ...]:
    """Draw how a cache is stored, and what its kernels know of it."""
    page_size = pick(rng, (None, *PAGE_SIZES))
    is_ragged = rng.random() < 0.4
    appends = rng.random() < 0.6
    turns = appends and rng.random() < 0.4
    float8 = dtype != "float64" and rng.random() < 0.3
    kinds = ("head",) if page_size is None else ("head", "page")
    return tuple({
        "page_size": page_size,
        "ragged": is_ragged,
        "appends": appends,
        "packed_new": is_ragged and appends and rng.random() < 0.5,
        "slots": page_size is None and rng.random() < 0.4,
        "leftpad": page_size is None and rng.random() < 0.4,
        "rotary_dim": 2 * int(rng.integers(0, head_dim // 2 + 1))
        if turns else None,
        "interleaved": bool(rng.random() < 0.5),
        "scales": pick(rng, kinds) if float8 else None,
        "by_int": rng.random() < 0.2,
    }.items())  # fmt: skip
