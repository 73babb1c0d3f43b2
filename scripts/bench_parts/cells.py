"""The grid of timed shapes, and their operation counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

from cuflash.plans.tiles import Tile

# The usual grid of attention benchmarks: tokens and columns are fixed, so all
# cells read and write arrays of the same size.
TOKENS = 16384
WIDTH = 2048  # heads * head_dim
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DIRECTIONS = ("forward", "backward")


class Grid(NamedTuple):
    """The shapes timed by default for a dtype."""

    tokens: int
    width: int
    head_dims: tuple[int, ...]
    seqlens: tuple[int, ...]


# Half as many columns: float32 and float64 take about 15 times as long.
WIDE_GRID = Grid(TOKENS, 1024, (64, 128), SEQLENS[1:])
GRID = Grid(TOKENS, WIDTH, HEAD_DIMS, SEQLENS)


def grid_of(dtype: str) -> Grid:
    """Return the default grid of a dtype."""
    return WIDE_GRID if dtype in ("float32", "float64") else GRID


@dataclass(frozen=True)
class Cell:
    """One shape in one direction."""

    direction: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    kv_heads: int | None = None  # default: as many as heads
    precision: str | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of q, out and dout."""
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        """Return the shape of k and v."""
        heads = self.kv_heads or self.heads
        return self.batch, self.seqlen, heads, self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def kind(self) -> str:
        """The kind of check for results: see checks.py.

        Against the error of plain code in the dtype ("low"), or against the
        error bounds of an arithmetic ("float64", "tf32x3").
        """
        exact = "float64" if self.dtype == "float64" else "low"
        return self.precision or exact

    @property
    def flops(self) -> float:
        """Operations: two matmuls over all pairs forward, five backward.

        The usual count: half under a causal mask, and 2.5 times the forward
        pass for the backward pass, which recomputes the scores.
        """
        pairs = self.batch * self.heads * self.seqlen**2
        forward = 4 * pairs * self.head_dim / (2 if self.causal else 1)
        return forward * (2.5 if self.direction == "backward" else 1)

    def tflops(self, ms: float) -> float:
        """Return the speed in TFLOP/s."""
        return self.flops / ms / 1e9

    @property
    def row(self) -> dict[str, Any]:
        """Return the cell's fields in a row of the record."""
        return asdict(self)

    def row_of_tiles(self, tile_of: Callable[[Cell], Tile]) -> dict[str, Any]:
        """Return further fields of the row, which depend on the tiles."""
        return {}

    def keywords(self, xp: ModuleType, dtype: Any) -> dict[str, Any]:
        """Return the keyword arguments of cuflash's call.

        Parameters
        ----------
        xp : module
            NumPy or CuPy: the library of arrays among the arguments.
        dtype : dtype
            Of q, k and v.
        """
        return {"causal": self.causal, "precision": self.precision}

    @property
    def problem_fields(self) -> dict[str, Any]:
        """Return the option fields of a `Problem`: docs/guide/options.md."""
        return {}

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.direction} d {self.head_dim} {mask} seqlen {self.seqlen}"
        )


def grid(
    directions,
    dtype,
    head_dims,
    masks,
    seqlens,
    tokens=TOKENS,
    width=WIDTH,
    kv_heads=None,
    heads=None,
    precision=None,
) -> list[Cell]:
    """Return every combination; batch and heads follow from the totals."""
    return [
        Cell(
            direction,
            dtype,
            head_dim,
            causal,
            seqlen,
            batch=max(tokens // seqlen, 1),
            heads=heads or max(width // head_dim, 1),
            kv_heads=kv_heads,
            precision=precision,
        )
        for direction, head_dim, causal, seqlen in product(
            directions, head_dims, masks, seqlens
        )
    ]


def geometric_mean(ratios: list[float]) -> float:
    """Return the geometric mean: 2x and 0.5x average to 1."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
