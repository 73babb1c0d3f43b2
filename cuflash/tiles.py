"""Tile sizes: those that kernels support, and tuned ones.

`candidates` lists the tiles that a family's kernel supports; `plan.py` knows
which of them fit a problem and a device. `tuned` looks up tables, one file
per architecture: those that scripts/sweep_blocks.py measured on this machine
(`folders.tile_tables`) and those of the package (``tile_tables/``).
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from cuflash import folders
from cuflash.errors import ValueRangeError

TABLES = Path(__file__).parent / "tile_tables"
FORMAT = "cuflash tile table, version 1"


@dataclass(frozen=True)
class Tile:
    """The tile of a block, and how its warps share it.

    Attributes
    ----------
    block_q, block_k : int
        Queries and keys.
    num_warps : int
        Warps of a block.
    blocks_per_sm : int
        Blocks that must fit on an SM at once; bounds the registers.
    num_stages : int
        Pipeline stages: of K and V in the wgmma forward pass, of Q and dO in
        backward passes.
    score_warps_q, gradient_warps_k : int
        Backward: warps along the queries of S, dP and dQ; along the keys of
        dK and dV.
    ptxas_level : int
        The optimisation level of ptxas. At 3 it may hoist loads so far that
        it runs out of registers and spills; at 1 it does not.
    directions : int
        Directions of a JVP that a block computes at once.
    """

    block_q: int
    block_k: int
    num_warps: int
    blocks_per_sm: int = 1
    num_stages: int = 1
    score_warps_q: int = 1
    gradient_warps_k: int = 1
    ptxas_level: int = 1
    directions: int = 1

    def __str__(self) -> str:
        shared = f", {self.directions} directions" * (self.directions > 1)
        return (
            f"{self.block_q} x {self.block_k}, {self.num_warps} warps{shared}"
        )


def candidates(family: str, direction: str) -> Iterator[Tile]:
    """Every tile that a family's kernel supports, large ones first."""
    if (family, direction) == ("wgmma", "forward"):
        # A consumer warpgroup per 64 queries, and one producer.
        for q, k, stages in product(
            (128, 192), (128, 176, 160, 144, 112, 96, 80, 64), (4, 3, 2)
        ):
            yield Tile(q, k, (q // 64 + 1) * 4, num_stages=stages)
        # For short sequences: one consumer, and several blocks on an SM.
        for k, stages, blocks in product((128, 96, 80, 64), (4, 3, 2), (3, 2)):
            yield Tile(64, k, 8, blocks, stages)
    elif (family, direction) == ("wgmma", "jvp"):
        # Two consumer warpgroups, and one producer.
        for k, stages in product((128, 64), (3, 2)):
            yield Tile(128, k, 12, num_stages=stages, ptxas_level=3)
        for k, stages in product((96, 80, 64), (3, 2)):
            yield Tile(128, k, 12, num_stages=stages, ptxas_level=3,
                       directions=2)  # fmt: skip
    elif (family, direction) == ("wgmma", "backward"):
        # Two consumer warpgroups with 64 keys each, and one producer.
        for q, stages in product((128, 64), (3, 2)):
            yield Tile(q, 128, 12, num_stages=stages, score_warps_q=q // 16,
                       ptxas_level=3)  # fmt: skip
        # Or three consumers that share the same 64 keys.
        for stages in (3, 2):
            yield Tile(64, 64, 16, num_stages=stages, score_warps_q=4,
                       ptxas_level=3)  # fmt: skip
    elif (family, direction) == ("mma", "forward"):
        for q, k, warps in product(
            (128, 64, 32), (128, 64, 32, 16), (4, 8, 2)
        ):
            yield Tile(q, k, warps)
    elif (family, direction) == ("mma", "jvp"):
        for q, k, warps, together in product(
            (64, 128, 32), (64, 32, 16), (4, 8, 2), (1, 2)
        ):
            yield Tile(q, k, warps, directions=together)
    elif (family, direction) == ("mma", "backward"):
        for q, k, warps, stages in product(
            (128, 64, 32), (128, 64, 32), (8, 4), (2, 1)
        ):
            for down, down_k in product((4, 2, 8, 1), repeat=2):
                if max(down, down_k) <= warps:
                    yield Tile(q, k, warps, 1, stages, down, down_k)
    elif (family, direction) == ("mma", "double_backward"):
        for q, k, warps, stages in product((64, 32), (64, 32), (8, 4), (2, 1)):
            for down, down_k in product((4, 2, 1), repeat=2):
                yield Tile(q, k, warps, 1, stages, down, down_k)
    elif family == "decode":
        # A warp per 16 keys.
        for q, warps, stages in product((16, 32), (16, 12, 8, 4), (3, 2, 4)):
            yield Tile(q, 16 * warps, warps, num_stages=stages, ptxas_level=3)
    elif family == "decode_simt":
        # A warp per 8, 4, 2 or 1 keys.
        for q, keys, warps in product((8, 4, 2, 1), (8, 4, 2, 1), (4, 8)):
            yield Tile(q, keys * warps, warps, ptxas_level=3)
    elif (family, direction) == ("fma", "forward"):
        for q, k, warps in product(
            (128, 64, 32, 16), (64, 48, 32, 16), (4, 8, 2)
        ):
            yield Tile(q, k, warps, ptxas_level=3)
    elif (family, direction) == ("fma", "jvp"):
        for q, k, warps, together in product(
            (128, 64, 32, 16), (64, 48, 32, 16), (8, 4, 2), (1, 2)
        ):
            yield Tile(q, k, warps, ptxas_level=3, directions=together)
    elif family == "fma":  # backward, double_backward
        for q, k, warps, down, down_k in product(
            (128, 112, 96, 64, 32, 16),
            (64, 32, 16),
            (8, 4),
            (4, 2, 8, 1),
            (2, 4, 1),
        ):
            if max(down, down_k) <= warps:
                yield Tile(q, k, warps, 1, 1, down, down_k, ptxas_level=3)
    elif (family, direction) == ("dmma", "forward"):
        for q, k, warps in product(
            (128, 64, 32, 16), (64, 32, 16), (8, 4, 2, 1)
        ):
            yield Tile(q, k, warps, ptxas_level=3)
    elif (family, direction) == ("dmma", "backward"):
        for q, k, warps, down, down_k in product(
            (64, 32, 16), (64, 32, 16), (8, 4), (4, 2, 1), (4, 2, 1)
        ):
            yield Tile(q, k, warps, 1, 1, down, down_k, ptxas_level=3)
    elif direction == "jvp" and family in ("dmma", "tf32x3"):
        for q, k, warps in product(
            (128, 64, 32, 16), (64, 32, 16), (8, 4, 2, 1)
        ):
            yield Tile(q, k, warps, ptxas_level=3)
    elif direction == "double_backward" and family in ("dmma", "tf32x3"):
        for q, k, warps, down, down_k in product(
            (64, 32, 16), (64, 32, 16), (8, 4, 2), (4, 2, 1), (4, 2, 1)
        ):
            if max(down, down_k) <= warps:
                yield Tile(q, k, warps, 1, 1, down, down_k, ptxas_level=3)
    elif (family, direction) == ("tf32x3", "forward"):
        for q, k, warps in product(
            (128, 64, 32, 16), (64, 32, 16), (4, 8, 2, 1)
        ):
            yield Tile(q, k, warps, ptxas_level=3)
    elif (family, direction) == ("tf32x3", "backward"):
        for q, k, warps, down, down_k in product(
            (128, 64, 32, 16),
            (128, 64, 32, 16),
            (8, 4, 2),
            (4, 2, 8, 1),
            (4, 2, 8, 1),
        ):
            if max(down, down_k) <= warps:
                yield Tile(q, k, warps, 1, 1, down, down_k, ptxas_level=3)
    else:
        for q, k in product((32, 16, 8, 4), repeat=2):
            yield Tile(q, k, num_warps=4)


# Variants of any tile; some kernels ignore them.
_BLOCKS_PER_SM, _PTXAS_LEVELS = (1, 2), (3, 1)


def variants(tile: Tile) -> Iterator[Tile]:
    """A tile with each bound on registers and each optimisation level."""
    all_blocks = dict.fromkeys((*_BLOCKS_PER_SM, tile.blocks_per_sm))
    for blocks, level in product(all_blocks, _PTXAS_LEVELS):
        yield replace(tile, blocks_per_sm=blocks, ptxas_level=level)


def is_known(family: str, direction: str, tile: Tile) -> bool:
    """Whether a tile is a variant of one of the `candidates`."""
    return tile in _all_variants(family, direction)


@functools.cache
def _all_variants(family: str, direction: str) -> frozenset[Tile]:
    return frozenset(
        variant
        for tile in candidates(family, direction)
        for variant in variants(tile)
    )


# ---- Tables ----


@dataclass(frozen=True)
class Entry:
    """A line of a table: the best known tile for a kind of problem.

    Attributes
    ----------
    arch : int
        Compute capability; 90 means 9.0.
    family, direction : str
    head_dim : int
        The larger of head_dim and head_dim_v.
    tile : Tile
    dtype : str or None
        None: any dtype of the family.
    causal : bool or None
        None: causal or not.
    option : str or None
        One of `OPTIONS`; None: calls with none of them.
    seqlen : int or None
        Tokens that a block iterates over (keys forward, queries backward);
        None: any number.
    tiles_per_sm : float or None
        Tiles of `ROWS_OF_A_TILE` rows per SM; None: any number.
    measured : mapping or None
        Device, driver, NVRTC, date, ms and TFLOP/s, if it was measured.
    """

    arch: int
    family: str
    direction: str
    head_dim: int
    tile: Tile
    dtype: str | None = None
    causal: bool | None = None
    option: str | None = None
    seqlen: int | None = None
    tiles_per_sm: float | None = None
    measured: Mapping[str, Any] | None = None


# Options that change which key tiles a block visits: with a window a few, the
# first and last partly masked; with segment ids any tile may be partly masked.
OPTIONS = ("window", "segment_ids")

# The types of an entry's fields, except for the tile; the tile's fields.
_KINDS = {
    "family": (str,),
    "direction": (str,),
    "head_dim": (int,),
    "dtype": (str, type(None)),
    "causal": (bool, type(None)),
    "option": (str, type(None)),
    "seqlen": (int, type(None)),
    "tiles_per_sm": (float, int, type(None)),
    "measured": (dict, type(None)),
}
_NEEDED = {"family", "direction", "head_dim", "tile"}
_TILE_FIELDS = {field.name for field in fields(Tile)}


def read_table(path: Path) -> tuple[Entry, ...]:
    """The entries of a file ``sm_90.json``.

    Raises
    ------
    ValueRangeError
        If it is not a table of that architecture, or has a tile that no
        kernel supports.
    OSError
        If it cannot be read.
    """
    try:
        return parse_table(path.read_bytes(), path.stem)
    except ValueRangeError as error:
        raise ValueRangeError(
            f"{path} is not a tile table: {error}"
        ) from error


def parse_table(content: str | bytes, arch: str) -> tuple[Entry, ...]:
    """The entries of a table's text; `arch` is a name such as ``sm_90``."""
    named = re.fullmatch(r"sm_(\d+)", arch)
    try:
        table = json.loads(content)
        if table["format"] != FORMAT:
            raise ValueRangeError(f"its format is {table['format']!r}")
        if not named or table["arch"] != arch:
            raise ValueRangeError(f"it is for {table['arch']!r}")
        return tuple(_entry(int(named[1]), x) for x in table["tiles"])
    except ValueRangeError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueRangeError(what) from error


def _entry(arch: int, found: dict[str, Any]) -> Entry:
    values = dict(found)
    if not _NEEDED <= values.keys() <= {*_KINDS, "tile"}:
        raise ValueRangeError(f"an entry has the fields {sorted(values)}")
    for name, kinds in _KINDS.items():
        if name in values and type(values[name]) not in kinds:
            raise ValueRangeError(f"{name} is {values[name]!r}")
    for name in ("head_dim", "seqlen", "tiles_per_sm"):
        if not (values.get(name) is None or 0 < values[name] < math.inf):
            raise ValueRangeError(f"{name} is {values[name]!r}")
    if values.get("option") not in (None, *OPTIONS):
        raise ValueRangeError(f"option is {values['option']!r}")
    sizes = values.pop("tile")
    if not sizes.keys() <= _TILE_FIELDS or any(
        type(size) is not int for size in sizes.values()
    ):
        raise ValueRangeError(f"a tile is {sizes!r}")
    tile = Tile(**sizes)
    if not is_known(values["family"], values["direction"], tile):
        raise ValueRangeError(
            f"no {values['family']} {values['direction']} kernel has the"
            f" tile {sizes!r}"
        )
    return Entry(arch, tile=tile, **values)


@functools.cache
def entries(folder: Path) -> tuple[Entry, ...]:
    """The entries of all tables in a folder; invalid tables are ignored."""
    found: list[Entry] = []
    for path in folders.files(folder, "sm_*.json"):
        try:
            found += read_table(path)
        except (ValueRangeError, OSError) as error:
            warnings.warn(
                f"{error}; it is ignored", RuntimeWarning, stacklevel=2
            )
    return tuple(found)


# ---- The nearest entry ----

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
) -> tuple[Tile, ...]:
    """The tiles of a family's entries, the nearest entry's tile first.

    The distance of an entry adds up differences in architecture, dtype,
    head_dim, causal, option, length and tiles per SM. At equal distance,
    entries measured on this machine come first.

    Parameters
    ----------
    capability : int
        Compute capability; 90 means 9.0.
    family, direction, dtype : str
    head_dim : int
        The larger of head_dim and head_dim_v.
    causal : bool
    option, seqlen, tiles_per_sm
        As in `Entry`.
    """
    return _tuned(
        folders.tile_tables(), capability, family, direction, dtype,
        head_dim, causal, option, _quarters(seqlen),
        _quarters(min(tiles_per_sm, _MANY_TILES_PER_SM)),
    )  # fmt: skip


def _quarters(number: float) -> float:
    """log2 of a number, rounded to quarters: a coarser cache key."""
    return round(4 * math.log2(max(number, 2**-10))) / 4


@functools.lru_cache(maxsize=4096)
def _tuned(
    folder: Path, capability: int, family: str, direction: str, *asked: Any
) -> tuple[Tile, ...]:
    far = [
        (
            extra
            + _arch_distance(entry.arch, capability)
            + _distance(entry, *asked),
            entry.tile,
        )
        for where, extra in ((folder, 0.0), (TABLES, _OF_THE_PACKAGE))
        for entry in entries(where)
        if (entry.family, entry.direction) == (family, direction)
    ]
    far.sort(key=lambda pair: pair[0])  # stable: this machine's first
    return tuple(dict.fromkeys(tile for _, tile in far))


def _arch_distance(arch: int, capability: int) -> float:
    if arch == capability:
        return 0.0
    other = _OLDER_ARCH if arch < capability else _NEWER_ARCH
    return other + abs(arch - capability) / 10


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
    if entry.seqlen is None:
        distance += _ANY_LENGTH
    else:
        distance += abs(math.log2(entry.seqlen) - length)
    if entry.tiles_per_sm is None:
        return distance + _ANY_LOAD
    tiles_per_sm = min(entry.tiles_per_sm, _MANY_TILES_PER_SM)
    return distance + abs(math.log2(tiles_per_sm) - load)
