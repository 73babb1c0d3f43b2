"""Tuned tiles: those of the table entries nearest to a problem on a GPU.

`tuned` reads two folders of tables: those that scripts/sweep_blocks.py
measured on this machine (`folders.tile_tables`) and those of the package
(`tiles.TABLES`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash import folders
from cuflash.plans import tiles
from cuflash.plans.kernel import OLDEST_WITH_CP_ASYNC
from cuflash.plans.tiles import Entry, Tile

ROWS_OF_A_TILE = 128  # for counting tiles, whichever tile is chosen

# The distance of an entry from a problem is a sum of these. The unit is an
# octave of length: a factor of two.
_OLDER_ARCH, _NEWER_ARCH = 8.0, 16.0  # and a tenth for each 0.1 between
_HEAD_DIM_OCTAVE = 4.0  # per octave of head_dim
_TOO_FEW_COLUMNS = 8.0
_OTHER_DTYPE, _OTHER_WIDTH = 0.25, 8.0
_OTHER_MASK, _OTHER_OPTION = 1.5, 4.0
_ANY_DTYPE, _ANY_MASK, _ANY_LENGTH, _ANY_LOAD = 0.25, 0.25, 2.0, 1.0
# Entries of the package's tables count less than this machine's own.
_OF_THE_PACKAGE = 0.5
# For another GPU: this, and of the same architecture an octave of bandwidth
# as one of length.
_OTHER_GPU = 0.25
# More tiles per SM than this make no difference.
_MANY_TILES_PER_SM = 8.0
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def tuned(
    capability: int,
    family: str,
    direction: str,
    dtype: str,
    head_dim: int,
    causal: bool,
    option: str | None,
    seqlen: float,
    tiles_per_sm: float,
    gpu: str | None = None,
    bandwidth: int | None = None,
    has: Sequence[str] = (),
) -> tuple[Tile, ...]:
    """The tiles of a family's entries, the nearest entry's tile first.

    The distance of an entry adds up differences in architecture, GPU, dtype,
    head_dim, causal, option, length and tiles per SM. Entries that reach no
    such call (`tiles.Entry`: needs, plain, reach) are left out. At equal
    distance, entries measured on this machine come first, then those that a
    table lists first.

    Parameters
    ----------
    capability : int
        Compute capability; 90 means 9.0.
    family, direction, dtype : str
    head_dim : int
        The larger of head_dim and head_dim_v.
    causal : bool
    option, seqlen, tiles_per_sm, gpu, bandwidth
        As in `tiles.Entry`.
    has : sequence of str
        The call's options, and max_score if it returns that.
    """
    return _tuned(
        folders.tile_tables(), capability, gpu, bandwidth, family, direction,
        tuple(x for x in tiles.NEEDS if x in has), not has, dtype, head_dim,
        causal, option, _quarters(seqlen),
        _quarters(min(tiles_per_sm, _MANY_TILES_PER_SM)),
    )  # fmt: skip


def _quarters(number: float) -> float:
    """log2 of a number, rounded to quarters: a coarser cache key."""
    return round(4 * math.log2(max(number, 2**-10))) / 4


@functools.lru_cache(maxsize=4096)
def _tuned(
    folder: Path, capability: int, gpu: str | None, bandwidth: int | None,
    family: str, direction: str, has: tuple[str, ...], is_plain: bool,
    *call: Any,
) -> tuple[Tile, ...]:  # fmt: skip
    far = [
        (
            extra
            + _arch_distance(entry.arch, capability)
            + _gpu_distance(entry, capability, gpu, bandwidth, unnamed)
            + _distance(entry, *call),
            entry.tile,
        )
        # This machine's own entries that name no GPU are for its GPU.
        for where, extra, unnamed in (
            (folder, 0.0, 0.0),
            (tiles.TABLES, _OF_THE_PACKAGE, _OTHER_GPU),
        )
        for entry in tiles.entries(where)
        if (entry.family, entry.direction) == (family, direction)
        # Without cp.async tiles have no stages: they tell nothing of others.
        and (entry.arch >= OLDEST_WITH_CP_ASYNC or entry.arch == capability)
        and (entry.needs is None or entry.needs in has)
        and (is_plain or not entry.plain)
        and _reaches(entry, capability, *call)
    ]
    far.sort(key=lambda pair: pair[0])  # stable: this machine's first
    return tuple(dict.fromkeys(tile for _, tile in far))


def _arch_distance(arch: int, capability: int) -> float:
    if arch == capability:
        return 0.0
    other = _OLDER_ARCH if arch < capability else _NEWER_ARCH
    return other + abs(arch - capability) / 10


def _gpu_distance(
    entry: Entry, capability: int, gpu: str | None, bandwidth: int | None,
    unnamed: float,
) -> float:  # fmt: skip
    """`unnamed`: that of entries for any GPU."""
    if gpu is None or entry.gpu == gpu:
        return 0.0
    if entry.gpu is None:
        return unnamed
    if entry.arch != capability or not (entry.bandwidth and bandwidth):
        return _OTHER_GPU
    return _OTHER_GPU + abs(math.log2(entry.bandwidth / bandwidth))


def _reaches(
    entry: Entry, capability: int, dtype: str, head_dim: int, causal: bool,
    option: str | None, length: float, load: float,
) -> bool:  # fmt: skip
    if entry.reach is None:
        return True
    return (
        (entry.arch, entry.head_dim) == (capability, head_dim)
        and entry.option == option
        and entry.causal in (None, causal)
        and (not entry.dtype or _WIDTHS.get(entry.dtype) == _WIDTHS[dtype])
        and all(x is None or x <= entry.reach
                for x in _apart(entry, length, load))
    )  # fmt: skip


def _apart(entry: Entry, length: float, load: float) -> list[float | None]:
    """Octaves of length and of load to a call; None: of an entry for any."""
    return [
        None if own is None else abs(math.log2(min(own, most)) - its)
        for own, its, most in (
            (entry.seqlen, length, math.inf),
            (entry.tiles_per_sm, load, _MANY_TILES_PER_SM),
        )
    ]


def _distance(
    entry: Entry, dtype: str, head_dim: int, causal: bool,
    option: str | None, length: float, load: float,
) -> float:  # fmt: skip
    """`length` and `load` are logarithms to base 2."""
    columns = math.log2(entry.head_dim / head_dim)
    distance = _HEAD_DIM_OCTAVE * abs(columns)
    if columns < 0:
        distance += _TOO_FEW_COLUMNS
    if entry.dtype is None:
        distance += _ANY_DTYPE
    elif _WIDTHS.get(entry.dtype) != _WIDTHS[dtype]:
        distance += _OTHER_WIDTH
    elif entry.dtype != dtype:
        distance += _OTHER_DTYPE
    if entry.causal is None:
        distance += _ANY_MASK
    elif entry.causal != causal:
        distance += _OTHER_MASK
    if entry.option != option:
        distance += _OTHER_OPTION
    longer, fuller = _apart(entry, length, load)
    distance += _ANY_LENGTH if longer is None else longer
    return distance + (_ANY_LOAD if fuller is None else fuller)
