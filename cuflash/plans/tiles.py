"""Tile sizes: those that kernels support, and tuned ones.

`candidates` lists the tiles that a family's kernel supports; `plan.py` knows
which of them fit a problem and a device. `entries` reads a folder of tables,
one file per architecture; `nearest_tiles.py` chooses among their entries.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cuflash import folders, settings
from cuflash.errors import ValueRangeError
from cuflash.request.readout import READOUT_GRADIENTS

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
        Pipeline stages: of K and V in the forward pass of sm90, of Q and dO in
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


@functools.cache
def candidates(family: str, direction: str) -> tuple[Tile, ...]:
    """Every tile that a family's kernel supports, large ones first."""
    listed = _CANDIDATES.get((family, direction))
    return () if listed is None else tuple(listed())


def _sm90_forward() -> Iterator[Tile]:
    # A consumer warpgroup per 64 queries, and one producer.
    for q, k, stages in product(
        (128, 192), (128, 176, 160, 144, 112, 96, 80, 64), (4, 3, 2)
    ):
        yield Tile(q, k, (q // 64 + 1) * 4, num_stages=stages)
    # For short sequences: one consumer, and several blocks on an SM.
    for k, stages, blocks in product((128, 96, 80, 64), (4, 3, 2), (3, 2)):
        yield Tile(64, k, 8, blocks, stages)
    # For large heads: scores, and two halves of O's columns.
    for k, stages in product((64, 80), (2, 3)):
        yield Tile(64, k, 16, num_stages=stages)


def _sm90_jvp() -> Iterator[Tile]:
    # Three consumer warpgroups, and one producer: for scores alone.
    yield Tile(192, 64, 16, num_stages=3, ptxas_level=3)
    # Two consumers.
    for k, stages in product((128, 64), (3, 2)):
        yield Tile(128, k, 12, num_stages=stages, ptxas_level=3)
    for k, stages in product((96, 80, 64), (3, 2)):
        yield Tile(128, k, 12, num_stages=stages, ptxas_level=3,
                   directions=2)  # fmt: skip


def _sm90_double_backward() -> Iterator[Tile]:
    # Three consumer warpgroups that share the same 64 keys, a producer.
    for stages in (3, 2):
        yield Tile(64, 64, 16, num_stages=stages, score_warps_q=4,
                   ptxas_level=3)  # fmt: skip


def _sm90_backward() -> Iterator[Tile]:
    # Two consumer warpgroups with 64 keys each, and one producer.
    for q, stages in product((128, 64), (3, 2)):
        yield Tile(q, 128, 12, num_stages=stages, score_warps_q=q // 16,
                   ptxas_level=3)  # fmt: skip
    yield from _sm90_double_backward()


def _sm80_forward() -> Iterator[Tile]:
    yield from _rows((128, 64, 32), (128, 64, 32, 16), (4, 8, 2),
                     ptxas_level=1)  # fmt: skip
    # Wide heads: warps share the rows too, `down` of them along queries.
    for q, k, warps, down in product(
        (128, 96, 64, 32), (64, 32, 16), (8, 4), (2, 4)
    ):
        yield Tile(q, k, warps, score_warps_q=down)


def _sm80_jvp() -> Iterator[Tile]:
    yield from _rows((64, 128, 32), (64, 32, 16), (4, 8, 2), (1, 2),
                     ptxas_level=1)  # fmt: skip
    # Wide heads, some of these too: more warps than 16 queries each have.
    yield from _rows((16,), (32, 16), (8, 4), ptxas_level=1)


def _sm80_backward() -> Iterator[Tile]:
    along = (4, 2, 8, 1)
    yield from _gradients((128, 64, 32), (128, 64, 32), (8, 4), along, along,
                          (2, 1), ptxas_level=1)  # fmt: skip
    # Wide heads: fewer keys, and fewer queries.
    for q, k in (((64, 32), (16,)), ((16,), (32, 16))):
        yield from _gradients(q, k, (8, 4), (4, 2, 1), (2, 1), ptxas_level=1)


def _sm80_double_backward() -> Iterator[Tile]:
    along = (4, 2, 1)
    yield from _gradients((64, 32), (64, 32), (8, 4), along, along, (2, 1),
                          ptxas_level=1)  # fmt: skip
    # Wide heads: fewer queries, and fewer keys.
    for q, k in (((16,), (32, 16)), ((32,), (16,))):
        yield from _gradients(q, k, (8, 4), (2, 1), (2, 1), (2, 1),
                              ptxas_level=1)  # fmt: skip


_Sizes = tuple[int, ...]


def _rows(
    q: _Sizes, k: _Sizes, warps: _Sizes, directions: _Sizes = (1,),
    ptxas_level: int = 3,
) -> Iterator[Tile]:  # fmt: skip
    """Warps share the rows of queries; blocks may share directions."""
    for rows, keys, count, together in product(q, k, warps, directions):
        yield Tile(rows, keys, count, ptxas_level=ptxas_level,
                   directions=together)  # fmt: skip


def _gradients(
    q: _Sizes, k: _Sizes, warps: _Sizes, down: _Sizes, down_k: _Sizes,
    stages: _Sizes = (1,), ptxas_level: int = 3,
) -> Iterator[Tile]:  # fmt: skip
    """`down` of the warps lie along queries of scores, `down_k` along keys."""
    for tile in product(q, k, warps, (1,), stages, down, down_k):
        _, _, count, *_, along_q, along_k = tile
        if max(along_q, along_k) <= count:
            yield Tile(*tile, ptxas_level=ptxas_level)


def _decode() -> Iterator[Tile]:
    # A warp per 16 keys.
    for q, warps, stages in product((16, 32), (16, 12, 8, 4), (3, 2, 4)):
        yield Tile(q, 16 * warps, warps, num_stages=stages, ptxas_level=3)
    # Without cp.async: three warps, which leave room for several blocks.
    for q in (16, 32):
        yield Tile(q, 48, 3, ptxas_level=3)


def _decode_sm90() -> Iterator[Tile]:
    # A consumer warpgroup per 64 rows, and one producer.
    for k, stages in product((128, 96, 80, 64), (4, 3, 2)):
        yield Tile(128, k, 12, num_stages=stages, ptxas_level=3)
    # Two blocks on an SM, each of which hides the other's ends.
    for blocks, k, stages in product((2, 1), (64, 128, 96, 80), (3, 2)):
        yield Tile(64, k, 8, blocks, stages, ptxas_level=3)
    for stages in (3, 2):  # of latent attention, whose warpgroups have roles
        yield Tile(64, 64, 16, num_stages=stages, ptxas_level=3)


def _decode_simt() -> Iterator[Tile]:
    # A warp per 8, 4, 2 or 1 keys.
    for q, keys, warps in product((8, 4, 2, 1), (8, 4, 2, 1), (4, 8)):
        yield Tile(q, keys * warps, warps, ptxas_level=3)


def _simt() -> Iterator[Tile]:
    for q, k in product((32, 16, 8, 4), repeat=2):
        yield Tile(q, k, num_warps=4)


def _float64_forward() -> Iterator[Tile]:
    keys, warps = (64, 32, 16), (8, 4, 2, 1)
    yield from _rows((128, 64, 32), keys, warps)
    yield from _rows((32,), (8,), (8, 4))  # wide heads
    yield from _rows((16,), keys, warps)


def _float64_double_backward() -> Iterator[Tile]:
    yield from _mma8_double_backward()
    # Half of the warps compute scores, half gradients.
    yield from _gradients(
        (32, 16), (64, 32, 16), (8, 4), (2, 1), (2, 1), stages=(2,)
    )


_fma_gradients = partial(
    _gradients, (128, 112, 96, 64, 32, 16), (64, 32, 16), (8, 4),
    (4, 2, 8, 1), (2, 4, 1),
)  # fmt: skip


def _fma_backward() -> Iterator[Tile]:
    yield from _fma_gradients()
    # For 64 KiB: three warps share head_dim 96, few queries leave room.
    yield from _gradients((48,), (16,), (3,), (3,), (1,))
    yield from _gradients((8,), (32, 16), (4,), (2,), (2, 1))
    # Narrow heads, few keys: a warp has 16 keys and 32 columns at least.
    yield from _gradients((128, 64, 32), (32,), (2,), (2, 1), (2, 1))


_mma8_rows = partial(_rows, (128, 64, 32, 16), (64, 32, 16))
_mma8_double_backward = partial(
    _gradients, (64, 32, 16), (64, 32, 16), (8, 4, 2), (4, 2, 1), (4, 2, 1)
)


def _pairs(
    rows: _Sizes, columns: _Sizes, warps: _Sizes, stages: _Sizes = (2, 1),
    blocks: _Sizes = (1,), *, rows_are_keys: bool = False,
) -> Iterator[Tile]:  # fmt: skip
    """Warps share the rows of a block's pairs (kernels/readouts/)."""
    for sizes in product(stages, blocks, rows, columns, warps):
        depth, together, fixed, streamed, count = sizes
        q, k = (streamed, fixed) if rows_are_keys else (fixed, streamed)
        yield Tile(q, k, count, together, depth, ptxas_level=3)


def _readouts(
    family: str, sums: Callable[..., Iterator[Tile]],
    weights: Callable[..., Iterator[Tile]] | None = None,
) -> dict[tuple[str, str], Callable[[], Iterator[Tile]]]:  # fmt: skip
    return {
        (family, "weights"): weights or sums,
        (family, "entropy"): sums,
        (family, "weight_sums"): partial(sums, rows_are_keys=True),
    }


def _readout_gradients(
    family: str, sizes: _Sizes, warps: _Sizes
) -> dict[tuple[str, str], Callable[[], Iterator[Tile]]]:
    squares = [
        Tile(size, size, count, num_stages=depth, ptxas_level=3)
        for size, count, depth in product(sizes, warps, (2, 1))
    ]
    return {
        (family, name): lambda: iter(squares) for name in READOUT_GRADIENTS
    }


_CANDIDATES: dict[tuple[str, str], Callable[[], Iterator[Tile]]] = {
    ("sm90", "forward"): _sm90_forward,
    ("sm90", "jvp"): _sm90_jvp,
    ("sm90", "double_backward"): _sm90_double_backward,
    ("sm90", "backward"): _sm90_backward,
    ("sm80", "forward"): _sm80_forward,
    ("sm80", "jvp"): _sm80_jvp,
    ("sm80", "backward"): _sm80_backward,
    ("sm80", "double_backward"): _sm80_double_backward,
    ("decode", "forward"): _decode,
    ("decode", "kvcache"): _decode,
    ("decode_sm90", "forward"): _decode_sm90,
    ("decode_sm90", "kvcache"): _decode_sm90,
    ("decode_simt", "forward"): _decode_simt,
    ("decode_simt", "kvcache"): _decode_simt,
    ("fma", "forward"): partial(
        _rows, (128, 64, 32, 16), (64, 48, 32, 16), (4, 8, 2)
    ),
    ("fma", "jvp"): partial(
        _rows, (128, 64, 32, 16), (64, 48, 32, 16), (8, 4, 2), (1, 2)
    ),
    ("fma", "backward"): _fma_backward,
    ("fma", "double_backward"): _fma_gradients,
    ("mma8_float64", "forward"): _float64_forward,
    ("mma8_float64", "jvp"): partial(_mma8_rows, (8, 4, 2, 1)),
    ("mma8_float64", "backward"): partial(
        _gradients, (64, 32, 16), (64, 32, 16), (8, 4), (4, 2, 1), (4, 2, 1)
    ),
    ("mma8_float64", "double_backward"): _float64_double_backward,
    ("mma8_float32", "forward"): partial(_mma8_rows, (4, 8, 2, 1)),
    ("mma8_float32", "jvp"): partial(_mma8_rows, (8, 4, 2, 1)),
    ("mma8_float32", "backward"): partial(
        _gradients, (128, 64, 32, 16), (128, 64, 32, 16), (8, 4, 2),
        (4, 2, 8, 1), (4, 2, 8, 1),
    ),
    ("mma8_float32", "double_backward"): _mma8_double_backward,
    ("simt", "forward"): _simt,
    ("simt", "backward"): _simt,
    ("simt", "jvp"): _simt,
    ("simt", "double_backward"): _simt,
    **_readouts(
        "sm80",
        partial(_pairs, (128, 256, 512, 64, 32), (128, 64, 32), (4, 8, 2),
                blocks=(3, 1, 2, 4)),
        partial(_pairs, (64, 128, 32), (64, 128, 32), (4, 2, 8),
                blocks=(3, 1, 2, 4)),
    ),
    **_readouts(
        "fma", partial(_pairs, (128, 64, 32), (64, 32, 16), (4, 8, 2))
    ),
    **_readouts(
        "mma8_float64",
        partial(_pairs, (128, 64, 32, 16), (64, 32, 16), (8, 4, 2, 1)),
    ),
    **_readouts(
        "mma8_float32",
        partial(_pairs, (128, 64, 32, 16), (64, 32, 16), (8, 4, 2, 1)),
    ),
    **_readouts(
        "simt", partial(_pairs, (32, 16, 8, 4), (32, 16, 8), (4, 2, 1), (1,))
    ),
    **_readout_gradients("sm80", (64, 32), (4, 2)),
    **_readout_gradients("fma", (64, 32), (4, 2)),
    **_readout_gradients("mma8_float64", (64, 32, 16), (4, 2, 1)),
    **_readout_gradients("mma8_float32", (64, 32, 16), (4, 2, 1)),
    **_readout_gradients("simt", (32, 16, 8), (4, 2, 1, 8)),
}  # fmt: skip


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
        Tiles of `ROWS_OF_A_TILE` rows (nearest_tiles.py) per SM; None: any
        number.
    needs : str or None
        One of `NEEDS`: calls without it do not take the tile; None: all may.
    plain : bool or None
        Whether only calls without options take the tile.
    reach : float or None
        Octaves of length and of tiles per SM, of calls alike in all else,
        beyond which no call takes the tile; None: any call to which the entry
        is the nearest. For tiles that gain by one kind of grid, and were
        timed on no other.
    gpu : str or None
        The GPU for which the tile is the best known; None: any.
    bandwidth : int or None
        The peak bandwidth of that GPU's memory in GB/s.
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
    needs: str | None = None
    plain: bool | None = None
    reach: float | None = None
    gpu: str | None = None
    bandwidth: int | None = None
    measured: Mapping[str, Any] | None = None


# Options that change which key tiles a block visits: with a window a few, the
# first and last partly masked; with segment ids any tile may be partly masked.
OPTIONS = ("window", "segment_ids")
# Options with which a tile was timed, but not without. They change no visits,
# so calls with them take the tiles of entries that need none as well.
NEEDS = ("bias",)

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
    "needs": (str, type(None)),
    "plain": (bool, type(None)),
    "reach": (float, int, type(None)),
    "gpu": (str, type(None)),
    "bandwidth": (int, type(None)),
    "measured": (dict, type(None)),
}
_NEEDED = {"family", "direction", "head_dim", "tile"}
# A table may have them too, for entries without.
GPU_FIELDS = ("gpu", "bandwidth")
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
    """The entries of a table's text; `arch` is a name such as ``sm_90``.

    Entries without a field "gpu" are for the GPU that the table names, if it
    does.
    """
    named = re.fullmatch(r"sm_(\d+)", arch)
    try:
        table = json.loads(content)
        if table["format"] != FORMAT:
            raise ValueRangeError(f"its format is {table['format']!r}")
        if not named or table["arch"] != arch:
            raise ValueRangeError(f"it is for {table['arch']!r}")
        gpu = {name: table[name] for name in GPU_FIELDS if name in table}
        return tuple(
            _entry(int(named[1]), x if "gpu" in x else {**gpu, **x})
            for x in table["tiles"]
        )
    except ValueRangeError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueRangeError(what) from error


def _entry(arch: int, found: dict[str, Any]) -> Entry:
    values = dict(found)
    family = values.get("family", "")
    values["family"] = settings.FORMER_FAMILIES.get(family, family)
    if not _NEEDED <= values.keys() <= {*_KINDS, "tile"}:
        raise ValueRangeError(f"an entry has the fields {sorted(values)}")
    for name, kinds in _KINDS.items():
        if name in values and type(values[name]) not in kinds:
            raise ValueRangeError(f"{name} is {values[name]!r}")
    for name in ("head_dim", "seqlen", "tiles_per_sm", "reach", "bandwidth"):
        if not (values.get(name) is None or 0 < values[name] < math.inf):
            raise ValueRangeError(f"{name} is {values[name]!r}")
    if values.get("option") not in (None, *OPTIONS):
        raise ValueRangeError(f"option is {values['option']!r}")
    if values.get("needs") not in (None, *NEEDS):
        raise ValueRangeError(f"needs is {values['needs']!r}")
    if values.get("bandwidth") and not values.get("gpu"):
        raise ValueRangeError("bandwidth is of no gpu")
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
