"""Random calls from the ranges of the benchmarks' grid, one per seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuflash.request.problem import Problem

# `make test` covers shorter ones, in which the error of plain code may happen
# to be 0, so that they need another bound.
FEWEST_TOKENS, MOST_TOKENS = 64, 16384
GRID_HEAD_DIMS = (64, 128, 256)
# As in the grid's longest cells: elements of the largest array, and (query,
# key) pairs times columns.
MOST_ELEMENTS = 16384 * 2048
MOST_WORK = 16384 * MOST_ELEMENTS


@dataclass(frozen=True)
class Shape:
    """A forward and a backward call; the seed also determines the inputs."""

    seed: int
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    deterministic: bool
    scale: float
    precision: str | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """The shapes of q, k, v and dout."""
        queries = self.batch, self.seqlen_q, self.num_heads_q
        keys = self.batch, self.seqlen_k, self.num_heads_kv
        return {
            "q": (*queries, self.head_dim),
            "k": (*keys, self.head_dim),
            "v": (*keys, self.head_dim_v),
            "dout": (*queries, self.head_dim_v),
        }

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def fits(self) -> bool:
        """Whether the shape is within the grid's limits."""
        elements = max(int(np.prod(x)) for x in self.shapes.values())
        columns = max(self.head_dim, self.head_dim_v)
        heads = self.batch * self.num_heads_q
        work = heads * self.seqlen_q * self.seqlen_k * columns
        return elements <= MOST_ELEMENTS and work <= MOST_WORK

    def problem(self, direction: str) -> Problem:
        """Return the problem of one of the calls, as cuflash makes it."""
        return Problem(
            direction, self.dtype, self.batch, self.seqlen_q, self.seqlen_k,
            self.num_heads_q, self.num_heads_kv, self.head_dim,
            self.head_dim_v, self.scale, self.causal,
            deterministic=self.deterministic and direction == "backward",
            precision=self.precision,
        )  # fmt: skip


def draw(seed: int) -> Shape:
    """Return the shape of a seed, always the same one."""
    rng = np.random.default_rng(seed)
    while True:
        shape = _draw(seed, rng)
        if shape.fits:
            return shape


def _draw(seed: int, rng: np.random.Generator) -> Shape:
    seqlen_q = seqlen_k = _length(rng)
    if rng.random() < 0.4:
        seqlen_k = _length(rng)
    head_dim = head_dim_v = _head_dim(rng)
    if rng.random() < 0.2:
        head_dim_v = _head_dim(rng)
    num_heads_kv = int(rng.integers(1, 9))
    group_size = int(rng.choice([1, 1, 1, 2, 4, 8]))
    factor = float(rng.choice([1, 1, 1, 1, -1, 0.25, 2]))
    return Shape(
        seed=seed,
        dtype=str(rng.choice(["float16", "bfloat16"])),
        batch=int(rng.integers(1, 9)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_kv * group_size,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=bool(rng.random() < 0.5),
        deterministic=bool(rng.random() < 0.5),
        scale=factor * head_dim**-0.5,
    )


def _length(rng: np.random.Generator) -> int:
    """Draw a length, log-uniform; half are near multiples of 64."""
    length = np.exp(rng.uniform(np.log(FEWEST_TOKENS), np.log(MOST_TOKENS)))
    if rng.random() < 0.5:
        length = length // 64 * 64 + rng.integers(-1, 2)
    return int(np.clip(length, FEWEST_TOKENS, MOST_TOKENS))


def _head_dim(rng: np.random.Generator) -> int:
    if rng.random() < 0.5:
        return int(rng.choice(GRID_HEAD_DIMS))
    return int(rng.integers(1, 257))
