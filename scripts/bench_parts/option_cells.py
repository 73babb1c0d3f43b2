"""Timed calls with options, and their numbers of visible pairs.

Each is compared with the same call without its option. docs/guide/options.md
defines the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.plans.tiles import Tile

from .cells import Cell

HEAD_DIMS = (128,)
SEQLENS = (4096, 16384)
WINDOW = (1024, 0)
SOFTCAP = 30.0
DOCUMENTS = 8  # per sequence with segment ids
LONG = 65536  # tokens
SHORT = 64  # tokens of all packed sequences but one
PLAIN = "none"  # the option field of a call without options


class Kind(NamedTuple):
    """The variants of an option."""

    causal: bool | None = None  # None: as requested
    own_seqlen: bool = False
    own_tokens: bool = False


OPTIONS = {
    "window": Kind(causal=True),
    "softcap": Kind(),
    "alibi_slopes": Kind(),
    "sink": Kind(),
    "segment_ids": Kind(causal=False),
    "bias": Kind(),
    "window_long": Kind(causal=True, own_seqlen=True, own_tokens=True),
    "packed": Kind(causal=True, own_seqlen=True),
}


@dataclass(frozen=True)
class OptionCell(Cell):
    """One call with an option; packed sequences are one batch of seqlen."""

    option: str = PLAIN

    @property
    def pairs(self) -> int:
        """Return the visible (query, key) pairs of a head in all batches."""
        if self.option == "segment_ids":
            ids = _documents(self.batch, self.seqlen)
            return sum(int(n) ** 2 for n in np.bincount(ids.ravel()))
        if self.option == "packed":
            return sum(_causal_pairs(n) for n in lengths(self.seqlen))
        if not self.causal:
            return self.batch * self.seqlen**2
        left = WINDOW[0] if self.has_window else None
        return self.batch * _causal_pairs(self.seqlen, left)

    @property
    def has_window(self) -> bool:
        return self.option in ("window", "window_long")

    @property
    def flops(self) -> float:
        """Return the operations of `Cell.flops`, for the visible pairs."""
        forward = 4 * self.heads * self.pairs * self.head_dim
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def plain(self) -> OptionCell:
        """Return the same cell without the option.

        For packed sequences: as many tokens, in sequences of the equal length
        that gives the nearest number of pairs.
        """
        plain = replace(self, option=PLAIN)
        if self.option != "packed":
            return plain
        equal = [
            replace(plain, seqlen=n, batch=self.seqlen // n)
            for n in range(1, self.seqlen + 1)
            if self.seqlen % n == 0
        ]
        return min(equal, key=lambda x: abs(x.pairs - self.pairs))

    @property
    def row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "pairs": self.pairs,
            "plain_pairs": self.plain.pairs,
            "beside": str(self.plain),
        }

    def row_of_tiles(self, tile_of: Callable[[Cell], Tile]) -> dict[str, Any]:
        return {
            "visited": self.visited_pairs(tile_of(self)),
            "plain_visited": self.plain.visited_pairs(tile_of(self.plain)),
        }

    def visited_pairs(self, tile: Tile) -> int:
        """Return the pairs of all tiles with at least one visible pair."""
        size = tile.block_q * tile.block_k
        if self.option == "segment_ids":
            ids = _documents(self.batch, self.seqlen)
            q_low, q_high = _ranges(ids, tile.block_q)
            k_low, k_high = _ranges(ids, tile.block_k)
            met = q_low[:, :, None] <= k_high[:, None]
            met &= k_low[:, None] <= q_high[:, :, None]
            return size * int(met.sum())
        packed = self.option == "packed"
        found = 0
        for n in lengths(self.seqlen) if packed else [self.seqlen]:
            first = np.arange(0, n, tile.block_q)
            end = np.minimum(first + tile.block_q, n) if self.causal else n
            left = WINDOW[0] if self.has_window else n
            tiles = -(-end // tile.block_k)
            tiles -= np.maximum(first - left, 0) // tile.block_k
            found += int(np.broadcast_to(tiles, first.shape).sum())
        return size * found * (1 if packed else self.batch)

    def keywords(self, xp: ModuleType, dtype: Any) -> dict[str, Any]:
        given = super().keywords(xp, dtype)
        heads, n = self.heads, self.seqlen
        if self.has_window:
            given["window"] = WINDOW
        elif self.option == "softcap":
            given["softcap"] = SOFTCAP
        elif self.option == "alibi_slopes":
            slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
            given["alibi_slopes"] = xp.asarray(slopes.astype(np.float32))
        elif self.option == "sink":
            # About the weight of all keys together: the effect of a smaller
            # one would be below the rounding error, hence unchecked.
            given["sink"] = _drawn(xp, (heads,)) + np.float32(np.log(n))
        elif self.option == "bias":
            shape = 1, 1, n, n  # of all batches and heads
            given["bias"] = _drawn(xp, shape).astype(dtype, copy=False)
        elif self.option == "segment_ids":
            ids = xp.asarray(_documents(self.batch, n))
            given["segment_ids_q"] = given["segment_ids_k"] = ids
        elif self.option == "packed":
            offsets = xp.asarray(np.cumsum([0, *lengths(n)], dtype=np.int32))
            given["cu_seqlens_q"] = given["cu_seqlens_k"] = offsets
            given["max_seqlen_q"] = given["max_seqlen_k"] = max(lengths(n))
        return given

    @property
    def problem_fields(self) -> dict[str, Any]:
        if self.has_window:
            left = WINDOW[0]
            return {"window": (left if left < self.seqlen - 1 else None, None)}
        return {
            PLAIN: {},
            "softcap": {"softcap": SOFTCAP},
            "bias": {
                "bias": self.dtype,
                "bias_is_broadcast": self.batch * self.heads > 1,
            },
            "packed": {
                "num_sequences": len(lengths(self.seqlen)),
                "max_seqlen_q": max(lengths(self.seqlen)),
                "max_seqlen_k": max(lengths(self.seqlen)),
            },
        }.get(self.option, {self.option: True})

    def __str__(self) -> str:
        text = f"{super().__str__()} batch {self.batch}"
        return text if self.option == PLAIN else f"{self.option} {text}"


def grid(
    options: Iterable[str],
    directions: Iterable[str],
    dtype: str,
    head_dims: Iterable[int],
    masks: Iterable[bool],
    seqlens: Iterable[int],
    tokens: int,
    width: int,
    kv_heads: int | None = None,
    heads: int | None = None,
) -> list[OptionCell]:
    """Return every combination of the options; see `cells.grid`."""
    found = []
    for option in options:
        kind = OPTIONS[option]
        total = LONG if kind.own_tokens else tokens
        found += [
            OptionCell(
                direction, dtype, head_dim, causal, seqlen,
                batch=total // seqlen,
                heads=heads or max(width // head_dim, 1),
                kv_heads=kv_heads,
                option=option,
            )
            for direction, head_dim, causal, seqlen in product(
                directions,
                head_dims,
                masks if kind.causal is None else [kind.causal],
                [total] if kind.own_seqlen else seqlens,
            )
        ]  # fmt: skip
    return found


def lengths(tokens: int) -> list[int]:
    """Return packed lengths: one has half of the tokens, others are short."""
    before = tokens // (4 * SHORT)
    long = tokens - 2 * before * SHORT
    return [SHORT] * before + [long] + [SHORT] * before


def _causal_pairs(seqlen: int, left: int | None = None) -> int:
    """Return the pairs of queries that see `left` earlier keys, or all.

    The sum of min(i, left) + 1 over i < seqlen.
    """
    cut = 0 if left is None else max(seqlen - 1 - left, 0)
    return (seqlen * (seqlen + 1) - cut * (cut + 1)) // 2


def _ranges(ids: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest id of each tile and batch."""
    starts = np.arange(0, ids.shape[1], block)
    of_tiles = np.minimum.reduceat, np.maximum.reduceat
    return tuple(reduce(ids, starts, axis=1) for reduce in of_tiles)


def _drawn(xp: ModuleType, shape: tuple[int, ...]) -> Any:
    """Return standard normal float32 numbers."""
    return xp.random.default_rng(1).standard_normal(shape, xp.float32)


def _documents(batch: int, seqlen: int) -> np.ndarray:
    """Return segment ids: consecutive documents of unequal lengths.

    All ids differ, also between batches.
    """
    random = np.random.default_rng(0)
    count = min(DOCUMENTS, seqlen)
    starts = np.zeros((batch, seqlen), np.int32)
    for row in starts:
        row[random.choice(seqlen - 1, count - 1, replace=False) + 1] = 1
    firsts = np.arange(batch, dtype=np.int32)[:, None] * DOCUMENTS
    return firsts + starts.cumsum(axis=1, dtype=np.int32)
