"""The sweep's groups of cells that share kernels, and their tiles."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import NamedTuple

from bench_parts import cells
from bench_parts.cells import Cell
from cuflash.build import nvrtc, source
from cuflash.plans import tiles
from cuflash.plans.plan import (
    Device,
    KernelPlan,
    Plan,
    family_of,
    is_legal,
    legal_tiles,
    main_file,
    plan,
)
from cuflash.plans.tiles import Tile
from cuflash.request.problem import Problem
from fuzz_parts.shapes import Shape

# Dtypes of families that do not run float16 and bfloat16; simt runs all.
DTYPES = {"fma": "float32", "mma8_float32": "float32",
          "mma8_float64": "float64", "simt": "float32"}  # fmt: skip


def dtype_of(families: list[str] | None) -> str:
    """Return the default dtype of a sweep of families."""
    return DTYPES.get(families[0], "bfloat16") if families else "bfloat16"


class Lengths(NamedTuple):
    """The lengths timed by default."""

    tokens: int
    width: int
    seqlens: tuple[int, ...]


# A call then takes at most about 20 ms, with eight tiles of 128 rows for each
# of 132 SMs at head_dim 128; smaller in every respect for simt.
LENGTHS = Lengths(cells.TOKENS, cells.WIDTH, cells.SEQLENS)
WIDE_LENGTHS = Lengths(8192, 2048, (1024, 4096))
SIMT_LENGTHS = Lengths(2048, 1024, (1024,))


def lengths_of(family: str) -> Lengths:
    """The default lengths of a family."""
    if family == "simt":
        return SIMT_LENGTHS
    return WIDE_LENGTHS if family in DTYPES else LENGTHS


@dataclass(frozen=True)
class Group:
    """Cells of all lengths, which share kernels."""

    family: str
    direction: str
    dtype: str
    head_dim: int
    causal: bool

    def problem(self, batch: int, seqlen: int, heads: int) -> Problem:
        """The problem of a shape, as the public calls make it."""
        d = self.head_dim
        return Problem(
            self.direction, self.dtype, batch, seqlen, seqlen, heads, heads,
            d, d, d**-0.5, self.causal, precision=self.precision,
        )  # fmt: skip

    @property
    def precision(self) -> str | None:
        """Return the argument of calls that run on the family."""
        return "tf32x3" if self.family == "mma8_float32" else None

    @property
    def is_wide(self) -> bool:
        """Whether its dtype has more than 16 bits."""
        return self.dtype in DTYPES.values()

    def cells(
        self,
        seqlens: list[int] | None = None,
        tokens: int | None = None,
        width: int | None = None,
    ) -> list[Cell]:
        """A cell for each length; batch and heads follow from the totals.

        Defaults are `lengths_of` the family.
        """
        known = lengths_of(self.family)
        return cells.grid(
            [self.direction], self.dtype, [self.head_dim], [self.causal],
            seqlens or known.seqlens, tokens or known.tokens,
            width or known.width, precision=self.precision,
        )  # fmt: skip

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.family} {self.direction} {self.dtype} d {self.head_dim}"
            f" {mask}"
        )


@dataclass(frozen=True)
class Choice:
    """A tile and its plan.

    Attributes
    ----------
    tile : Tile
    kernels : tuple of KernelPlan
        All that a call runs.
    digest : str
        A hash of all that its speed depends on: texts and options.
    """

    tile: Tile
    kernels: tuple[KernelPlan, ...]
    digest: str

    def main(self, family: str) -> list[KernelPlan]:
        """Return the kernels that depend on the tile."""
        return [k for k in self.kernels if main_file(family, k.file)]


def groups(
    families: list[str] | None,
    directions: list[str],
    dtype: str,
    head_dims: list[int],
    masks: list[bool],
    device: Device,
) -> list[Group]:
    """All combinations that a device has kernels for.

    Parameters
    ----------
    families : list of str or None
        None: the default family of calls.
    """
    found = []
    for direction, head_dim, causal in product(directions, head_dims, masks):
        any_family = Group("", direction, dtype, head_dim, causal)
        problem = any_family.problem(1, 1024, 1)
        for family in families or [family_of(problem, device)]:
            if family_of(problem, device, family) == family:
                found.append(Group(family, direction, dtype, head_dim, causal))
    return found


def choices(group: Group, device: Device) -> list[Choice]:
    """Every tile that a group's kernels can run, today's neighbours first.

    Tiles with identical kernels are one choice.
    """
    problem = group.problem(1, 1024, 1)
    today = plan(problem, device, group.family).tile
    made: dict[tuple[KernelPlan, ...], Tile] = {}
    for legal in legal_tiles(problem, device, group.family):
        for tile in tiles.variants(legal):
            if is_legal(problem, device, group.family, tile):
                decided = plan(problem, device, group.family, tile)
                made.setdefault(decided.kernels, tile)
    made = dict(sorted(made.items(), key=lambda x: steps(x[1], today)))
    return [Choice(t, k, digest(k, device.arch)) for k, t in made.items()]


def check_shapes(group: Group) -> list[Shape]:
    """Yield ragged shapes with grouped heads; the second wraps pipelines."""
    short = Shape(
        seed=1,
        dtype=group.dtype,
        batch=2,
        seqlen_q=201,
        seqlen_k=333,
        num_heads_q=4,
        num_heads_kv=2,
        head_dim=group.head_dim,
        head_dim_v=group.head_dim,
        causal=group.causal,
        deterministic=False,
        scale=group.head_dim**-0.5,
        precision=group.precision,
    )
    long = replace(
        short, seed=2, batch=1, seqlen_q=1667, seqlen_k=1409, num_heads_q=2
    )
    return [short, long]


def companions(
    group: Group, device: Device, cells: list[Cell]
) -> list[KernelPlan]:
    """Kernels of the other direction, which checks and cells call too."""
    problems = []
    for shape in check_shapes(group):
        problems += map(shape.problem, ("forward", "backward"))
    if group.direction == "backward":
        forward = replace(group, direction="forward")
        sizes = [(x.batch, x.seqlen, x.heads) for x in cells]
        problems += [forward.problem(*x) for x in sizes]
    kernels = [
        kernel
        for problem in problems
        if problem.direction != group.direction
        for kernel in plan(problem, device, group.family).kernels
    ]
    return list(dict.fromkeys(kernels))


def steps(tile: Tile, other: Tile) -> float:
    """The distance of two tiles: octaves, summed over all fields."""
    return sum(
        abs(math.log2(getattr(tile, name) / getattr(other, name)))
        for name in (field.name for field in fields(Tile))
    )


def digest(kernels: tuple[KernelPlan, ...], arch: str) -> str:
    """A hash of NVRTC's input."""
    given = [(source.build(k), nvrtc.options(k, arch)) for k in kernels]
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def planned(cell: Cell, family: str, device: Device) -> Plan:
    """The tile that a call of a cell uses today."""
    group = Group(
        family, cell.direction, cell.dtype, cell.head_dim, cell.causal
    )
    problem = group.problem(cell.batch, cell.seqlen, cell.heads)
    return plan(problem, device, family)


def words(tile: Tile) -> str:
    """Describe a tile; fields equal to 1 are left out."""
    parts = [f"{tile.block_q}x{tile.block_k}", f"{tile.num_warps}w"]
    if tile.num_stages > 1:
        parts.append(f"{tile.num_stages}st")
    if tile.score_warps_q > 1 or tile.gradient_warps_k > 1:
        parts.append(f"{tile.score_warps_q}/{tile.gradient_warps_k}")
    if tile.blocks_per_sm > 1:
        parts.append(f"{tile.blocks_per_sm}b")
    return " ".join([*parts, f"O{tile.ptxas_level}"])


DEFAULTS = asdict(Tile(0, 0, 0))


def as_json(tile: Tile) -> dict[str, int]:
    """Return a tile's fields, except defaults that a table omits."""
    return {k: v for k, v in asdict(tile).items() if v != DEFAULTS[k]}
