"""Sequences, and caches that hold them: contiguous or in random pages."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cuflash.reference import attention as materialised

from .reference_cases import ReferenceCase, bounds


@dataclass(frozen=True)
class CacheCase:
    """A call: tokens before it, and new ones, of each sequence.

    Elements of the caches that hold no token are NaN.
    """

    before: tuple[int, ...] = (3, 5)
    seqlen_new: int = 2
    seqlen_q: int = 2
    num_heads_kv: int = 2
    group_size: int = 2
    head_dim: int = 4
    head_dim_v: int = 3
    page_size: int = 3
    spare: int = 0  # rows of the cache beyond the longest sequence
    causal: bool = False
    seed: int = 0

    @property
    def batch(self):
        return len(self.before)

    @property
    def lengths(self):
        """The length of each sequence after the call."""
        return [x + self.seqlen_new for x in self.before]

    @property
    def capacity(self):
        return max(self.lengths) + self.spare

    def queries(self):
        """Return q, (batch, seqlen_q, num_heads_q, head_dim)."""
        heads = self.num_heads_kv * self.group_size
        shape = (self.batch, self.seqlen_q, heads, self.head_dim)
        return np.random.default_rng(self.seed).standard_normal(shape)

    def sequences(self):
        """Return the (k, v) of each whole sequence, tokens first."""
        rng = np.random.default_rng(self.seed + 1)
        shapes = [(self.num_heads_kv, d)
                  for d in (self.head_dim, self.head_dim_v)]  # fmt: skip
        return [
            tuple(rng.standard_normal((n, *shape)) for shape in shapes)
            for n in self.lengths
        ]

    def new(self):
        """Return k_new and v_new, (batch, seqlen_new, num_heads_kv, d)."""
        pairs = zip(self.before, self.sequences(), strict=True)
        rows = [(k[n:], v[n:]) for n, (k, v) in pairs]
        return tuple(np.stack(x) for x in zip(*rows, strict=True))

    def contiguous(self):
        """Return k_cache and v_cache, before the call."""
        caches = [
            np.full((self.batch, self.capacity, self.num_heads_kv, d), np.nan)
            for d in (self.head_dim, self.head_dim_v)
        ]
        for b, sequence in enumerate(self.sequences()):
            for cache, x in zip(caches, sequence, strict=True):
                cache[b, : self.before[b]] = x[: self.before[b]]
        return caches

    def paged(self):
        """Return k_cache, v_cache and a random page table.

        Entries beyond the length after the call are outside the caches.
        """
        each = [-(-n // self.page_size) for n in self.lengths]
        numbers = np.random.default_rng(self.seed).permutation(sum(each) + 1)
        table = np.full((self.batch, max(each) + 1), 2**31 - 1, np.int32)
        for b, pages in enumerate(
            np.split(numbers[:-1], np.cumsum(each)[:-1])
        ):
            table[b, : len(pages)] = pages
        caches = []
        for whole in self.contiguous():
            shape = len(numbers), self.page_size, *whole.shape[2:]
            caches.append(np.full(shape, np.nan))
            for b, n in enumerate(self.before):
                t = np.arange(n)
                page, row = t // self.page_size, t % self.page_size
                caches[-1][table[b, page], row] = whole[b, :n]
        return *caches, table

    def alone(self, b, q=None, k=None, **options):
        """Attention of one whole sequence, and its bounds, heads first."""
        keys, v = self.sequences()[b]
        q = self.queries()[b] if q is None else q
        q = np.moveaxis(q, 1, 0)
        k, v = (
            np.repeat(np.moveaxis(x, 1, 0), self.group_size, axis=0)
            for x in (keys if k is None else k, v)
        )
        options = {"causal": self.causal, "heads_first": True, **options}
        out, lse = materialised.attention(q, k, v, **options)
        limits = bounds(ReferenceCase(), q, k, v, np.zeros_like(out))
        return np.moveaxis(out, 0, 1), lse, limits


@st.composite
def cache_cases(draw, **fixed):
    """Draw a small call."""
    drawn = {
        "before": tuple(
            draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        ),
        "seqlen_new": draw(st.integers(0, 4)),
        "seqlen_q": draw(st.integers(1, 5)),
        "num_heads_kv": draw(st.integers(1, 2)),
        "group_size": draw(st.integers(1, 3)),
        "head_dim": 2 * draw(st.integers(1, 4)),
        "head_dim_v": draw(st.integers(1, 5)),
        "page_size": draw(st.integers(1, 5)),
        "spare": draw(st.integers(0, 3)),
        "causal": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 2)),
    }
    return CacheCase(**{**drawn, **fixed})
