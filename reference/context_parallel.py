r"""Context parallelism: who computes which block when, bytes, and time.

n ranks share a sequence of N tokens. In step s rank r computes with the keys
of rank r - s (modulo n), which that rank sends to it while it computes step
s - 1. Partial results (out, lse) of the steps are merged as in
`tile_state.TileState.merge` ([RA] Liu, Zaharia and Abbeel 2023,
arXiv:2310.01889). In the backward pass P = exp(S - lse) with the lse of all
keys, so each step's dq, dk and dv are summands of the whole; rank r sends its
dk and dv of step s back to rank r - s.

Layouts: "contiguous", rank r holds chunk r of n; "zigzag", chunks r and
2 n - 1 - r of 2 n. Under a causal mask a rank with zigzag chunks of c = N / 2n
tokens computes c (2 c + 1) pairs in step 0 and 2 c^2 in every other step:
against the keys of an earlier rank all its queries see the first chunk, and
against those of a later one its second chunk of queries sees both.

Example
-------
Four ranks, 64 tokens, causal: with contiguous chunks rank 3 computes seven
times as much as rank 0.

>>> from cuflash.reference.context_parallel import Sharded
>>> for layout in ("contiguous", "zigzag"):
...     shared = Sharded(4, 64, layout, causal=True)
...     work = [[s.pairs for s in shared.steps(r)] for r in range(4)]
...     print(layout, [sum(steps) for steps in work], work[3])
contiguous [136, 392, 648, 904] [136, 256, 256, 256]
zigzag [520, 520, 520, 520] [136, 128, 128, 128]

The keys that travel, in tokens: a window of 8 needs those of the rank before.

>>> shared = Sharded(4, 64, "contiguous", causal=True, window=(8, None))
>>> [[s.keys for s in shared.steps(r)[1:]] for r in range(4)]
[[0, 0, 0], [8, 0, 0], [8, 0, 0], [8, 0, 0]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LAYOUTS = ("contiguous", "zigzag")


class Step(NamedTuple):
    """What a rank does in a step.

    Attributes
    ----------
    source : int
        The rank whose keys it computes with.
    pairs : int
        Visible pairs of its queries and those keys.
    keys : int
        Of those keys, how many any of its queries sees: those that travel
        to it, except in step 0.
    """

    source: int
    pairs: int
    keys: int


@dataclass(frozen=True)
class Sharded:
    """A sequence that ranks share.

    Attributes
    ----------
    size : int
        Ranks.
    seqlen : int
        Tokens of queries and of keys; a multiple of the chunks.
    layout : str
    causal : bool
    window : tuple
        (left, right), each None for no bound.
    """

    size: int
    seqlen: int
    layout: str = "zigzag"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        count = 2 * self.size if self.layout == "zigzag" else self.size
        if self.layout not in LAYOUTS or self.seqlen % count:
            raise ValueError(f"{self} has no equal chunks")
        return self.seqlen // count

    def positions(self, rank: int) -> np.ndarray:
        """The positions of a rank's tokens, in the order in which it has them.

        Returns
        -------
        ndarray of int, (seqlen / size,)
        """
        chunks = [rank]
        if self.layout == "zigzag":
            chunks.append(2 * self.size - 1 - rank)
        within = np.arange(self.chunk)
        return np.concatenate([x * self.chunk + within for x in chunks])

    def visible(self, rank_q: int, rank_k: int) -> np.ndarray:
        """Which pairs of two ranks' tokens are visible.

        Returns
        -------
        ndarray of bool, (seqlen / size, seqlen / size)
        """
        i = self.positions(rank_q)[:, None]
        j = self.positions(rank_k)
        left, right = self.window
        seen = np.ones((i.size, j.size), bool)
        if self.causal:
            seen &= j <= i
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
        return seen

    def steps(self, rank: int) -> list[Step]:
        """What a rank computes, and whose keys it gets, step by step."""
        found = []
        for step in range(self.size):
            source = (rank - step) % self.size
            found.append(Step(source, *self.counts(rank, source)))
        return found

    def counts(self, rank_q: int, rank_k: int) -> tuple[int, int]:
        """Visible pairs, and keys that are visible to any query."""
        if self.window != (None, None):
            seen = self.visible(rank_q, rank_k)
            return int(seen.sum()), int(seen.any(axis=0).sum())
        own, chunk = self.seqlen // self.size, self.chunk
        if not self.causal:
            return own * own, own
        if rank_q == rank_k:
            return self._diagonal(), own
        if self.layout == "contiguous":
            return (own * own, own) if rank_k < rank_q else (0, 0)
        return own * chunk, chunk if rank_k < rank_q else own

    def _diagonal(self) -> int:
        """Pairs of a rank's queries and its own keys, causal.

        A rank's tokens are in ascending order, so each sees those before it.
        """
        own = self.seqlen // self.size
        return own * (own + 1) // 2


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer's arrays."""

    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    def flops(self, pairs: int, backward: bool = False) -> float:
        """Operations for visible pairs: [FA2], 4 per pair and column.

        The backward pass has five products where forward has two.
        """
        forward = 4.0 * pairs * self.num_heads_q * self.head_dim
        return 2.5 * forward if backward else forward

    def key_bytes(self, keys: int) -> int:
        """Bytes of keys and of values; of their gradients as many."""
        return 2 * keys * self.num_heads_kv * self.head_dim * (
            self.element_bytes
        )  # fmt: skip


def bytes_sent(
    shared: Sharded, heads: Heads, rank: int, backward: bool = False
) -> int:
    """Bytes that a rank sends: its keys, and others' gradients back."""
    total = 0
    for step in range(1, shared.size):
        target, source = ((rank + x) % shared.size for x in (step, -step))
        total += heads.key_bytes(shared.counts(target, rank)[1])
        if backward:
            total += heads.key_bytes(shared.counts(rank, source)[1])
    return total


class Predicted(NamedTuple):
    """Seconds of a pass on the slowest rank, and the efficiency.

    Attributes
    ----------
    seconds : float
    exposed : float
        Of them, those in which the rank waits for arrays.
    efficiency : float
        The time of one device for the whole sequence, over `seconds` times
        the number of ranks.
    """

    seconds: float
    exposed: float
    efficiency: float


def predict(
    shared: Sharded,
    heads: Heads,
    *,
    flops_rate: float,
    link_rate: float,
    backward: bool = False,
) -> Predicted:
    """Predict the time of a pass from two measured rates.

    A step's keys travel while the step before computes, and gradients of keys
    while the next one does; a step takes the longer of the two, and the last
    gradients travel alone.

    Parameters
    ----------
    shared : Sharded
    heads : Heads
    flops_rate : float
        Operations a second of one device: of a call with a step's shape.
    link_rate : float
        Bytes a second that a device sends, and receives, at once.
    backward : bool, optional
        The backward pass instead of the forward pass.

    Returns
    -------
    Predicted

    Examples
    --------
    At 600 TFLOP/s and 300 GB/s, of 65,536 tokens, 2 to 1,024 ranks:

    >>> for size in (2, 16, 128, 1024):
    ...     time = predict(
    ...         Sharded(size, 65536, causal=True), Heads(),
    ...         flops_rate=600e12, link_rate=300e9,
    ...     )
    ...     print(f"{size} ranks: {100 * time.efficiency:.0f} %")
    2 ranks: 100 %
    16 ranks: 100 %
    128 ranks: 51 %
    1024 ranks: 6 %
    """
    slowest, waited = 0.0, 0.0
    for rank in sorted({0, shared.size // 2, shared.size - 1}):
        steps = shared.steps(rank)
        compute = [heads.flops(x.pairs, backward) / flops_rate for x in steps]
        travel = [heads.key_bytes(x.keys) / link_rate for x in steps]
        travel[0] = 0.0
        # While a step computes travel the next step's keys, and the gradients
        # of the last one.
        during = [*travel[1:], 0.0]
        last = 0.0
        if backward:
            during = [
                x + y for x, y in zip(during, [0.0, *travel[:-1]], strict=True)
            ]
            last = travel[-1]
        seconds = last + sum(map(max, compute, during))
        if seconds > slowest:
            slowest, waited = seconds, seconds - sum(compute)
    pairs = shared.seqlen**2
    if shared.causal:
        pairs = shared.seqlen * (shared.seqlen + 1) // 2
    if shared.window != (None, None):
        pairs = sum(
            step.pairs
            for rank in range(shared.size)
            for step in shared.steps(rank)
        )
    alone = heads.flops(pairs, backward) / flops_rate
    return Predicted(slowest, waited, alone / slowest / shared.size)
