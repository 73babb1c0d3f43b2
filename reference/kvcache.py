r"""Attention over a cache of keys and values, which grows by new tokens.

A call appends the keys and values of new tokens to each sequence's cache, in
place, then attends from the queries to the cached tokens:

.. math::
    \tilde K_b &= [K_b[: L_b], rotate(K^{new}_b, L_b + i)] \\
    O_b &= attention(rotate(Q_b, p_b), \tilde K_b[first_b : n_b],
                     \tilde V_b[first_b : n_b]), \quad n_b = L_b + len_b

L_b is the length before the call, len_b the number of new tokens, first_b
the left padding. Token t of sequence b is stored in one of two ways:

- contiguous: in row t of slot b, or of slot ``cache_batch_idx[b]``;
- paged: in row ``t % page_size`` of page ``page_table[b, t // page_size]``
  ([PA] Kwon et al. 2023, arXiv:2309.06180, section 4.1).

Query i of seqlen_q is at position n_b - seqlen_q + i: causal masks, windows
and ALiBi are aligned at the end, as in `masks`.

Example
-------
Three tokens, one after the other, appended to an empty cache of 4 rows: the
results are the rows of causal attention.

>>> import numpy as np
>>> from cuflash.reference.attention import attention
>>> from cuflash.reference.kvcache import forward_kvcache
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 1, 8))
>>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 8))
>>> expected, _ = attention(q[0, :, 0], k[0, :, 0], v[0, :, 0], causal=True)
>>> for i in range(3):
...     new = slice(i, i + 1)
...     out, lse = forward_kvcache(
...         q[:, new], k_cache, v_cache, cache_seqlens=i,
...         k_new=k[:, new], v_new=v[:, new],
...     )
...     print(i, np.allclose(out[0, 0, 0], expected[i], rtol=1e-14))
0 True
1 True
2 True
>>> print(k_cache[0, :, 0, 0].round(3))
[ 0.903 -0.159 -1.259  0.   ]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .attention import attention
from .expressions import HeadIndices
from .masks import UNBOUNDED, Window
from .packed import spans
from .rotary import apply_rotary

LARGEST_FLOAT8 = {"float8_e4m3fn": 448.0}

Index = tuple[Any, np.ndarray]


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where the tokens of each sequence are stored.

    Attributes
    ----------
    rows : int
        The length of the caches' second axis: capacity, or page_size.
    slots : ndarray of int, (batch,)
        The slot of each sequence; ignored if there is a page table.
    page_table : ndarray of int, (batch, max_pages), or None
    """

    rows: int
    slots: np.ndarray
    page_table: np.ndarray | None = None

    @property
    def capacity(self) -> int:
        """The largest length of a sequence."""
        if self.page_table is None:
            return self.rows
        return self.page_table.shape[1] * self.rows

    def of(self, sequence: int, start: int, stop: int) -> Index:
        """Index the first two axes of a cache by tokens [start, stop).

        The page table is read only where these tokens need it.
        """
        tokens = np.arange(start, stop)
        if self.page_table is None:
            return self.slots[sequence], tokens
        pages = self.page_table[sequence, tokens // self.rows]
        return pages, tokens % self.rows


class Sequence(NamedTuple):
    """One sequence: its index, its queries and its lengths.

    queries indexes q's leading axes; new those of k_new and v_new. Cached
    tokens are [first, before), new ones [before, stop).
    """

    number: int
    queries: Any
    new: Any
    first: int
    before: int
    stop: int


# Quantised caches ----------------------------------------------------------


def dequantise(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Return stored * scale in float64; scale is (..., num_heads_kv)."""
    values = np.asarray(stored, np.float64)
    return values if scale is None else values * scale[..., None]


@np.errstate(over="ignore", invalid="ignore")
def quantise(
    values: np.ndarray, scale: np.ndarray | None, dtype: np.dtype
) -> np.ndarray:
    """Return values / scale, rounded to dtype.

    float8 saturates: a magnitude beyond its largest number becomes that
    number. NaN stays.
    """
    values = np.asarray(values, np.float64)
    if scale is not None:
        values = values / scale[..., None]
    largest = LARGEST_FLOAT8.get(dtype.name, np.inf)
    return np.clip(values, -largest, largest).astype(dtype)


def scale_of(scale: np.ndarray | None, pages: Any) -> np.ndarray | None:
    """Return the scales of tokens on these pages.

    Parameters
    ----------
    scale : ndarray, (num_heads_kv,) or (num_pages, num_heads_kv), or None
    pages : ndarray of int, (tokens,), or int

    Returns
    -------
    ndarray, (num_heads_kv,) or (tokens, num_heads_kv), or None
    """
    if scale is None or np.ndim(scale) == 1:
        return scale
    return np.asarray(scale)[pages]


def load(
    cache: np.ndarray, index: Index, scale: np.ndarray | None
) -> np.ndarray:
    """Return cached tokens, (tokens, num_heads_kv, head_dim), in float64."""
    return dequantise(cache[index], scale_of(scale, index[0]))


def store(
    cache: np.ndarray,
    index: Index,
    values: np.ndarray,
    scale: np.ndarray | None,
) -> None:
    """Write tokens to a cache, rounded to its dtype."""
    cache[index] = quantise(values, scale_of(scale, index[0]), cache.dtype)


# Sequences -----------------------------------------------------------------


def sequences(
    q: np.ndarray,
    k_new: np.ndarray | None,
    lengths: np.ndarray,
    leftpad: np.ndarray,
    cu_seqlens_q: np.ndarray | None,
) -> Iterator[Sequence]:
    """Yield each sequence.

    With `cu_seqlens_q`, q is packed, and so is a k_new with three axes, by
    the same offsets; none is yielded if an offset is invalid.
    """
    batch = len(lengths)
    if cu_seqlens_q is None:
        queries: list[Any] = [*range(batch)]
    else:
        found = spans(cu_seqlens_q, cu_seqlens_q, len(q), len(q))
        queries = [span.queries for span in found]
    for b, at in enumerate(queries):
        new = at if k_new is not None and k_new.ndim == 3 else b
        count = 0 if k_new is None else len(k_new[new])
        before = int(lengths[b])
        yield Sequence(b, at, new, int(leftpad[b]), before, before + count)


def check_addresses(
    parts: list[Sequence], at: Addresses, num_slots: int
) -> None:
    """Raise ValueError if a token's address is outside the caches.

    Parameters
    ----------
    parts : list of Sequence
    at : Addresses
    num_slots : int
        The length of the caches' first axis.
    """
    for part in parts:
        if part.before < 0 or part.first < 0:
            raise ValueError(f"a length is negative: {part}")
        if part.stop > at.capacity:
            raise ValueError(
                f"sequence {part.number} has {part.stop} tokens, the cache "
                f"holds {at.capacity}"
            )
        used, _ = at.of(part.number, 0, part.stop)
        if np.any((used < 0) | (used >= num_slots)):
            raise ValueError(
                f"sequence {part.number} is in {used}, the cache has 0 to "
                f"{num_slots - 1}"
            )


def query_positions(
    seqlen_q: int, before: int, causal: bool, window: Window
) -> np.ndarray:
    """Return the positions by which queries are rotated, (seqlen_q,).

    before, before + 1, ... if queries are causal or windowed, else before
    for all, as flash-attn rotates them.
    """
    ordered = causal or tuple(window) != UNBOUNDED
    return before + ordered * np.arange(seqlen_q)


# The call ------------------------------------------------------------------


def by_group(x: np.ndarray, num_heads_kv: int) -> np.ndarray:
    """Convert (tokens, heads, d) to (num_heads_kv, group_size, tokens, d)."""
    tokens, heads, d = x.shape
    group_size = heads // max(num_heads_kv, 1)
    split = x.reshape(tokens, num_heads_kv, group_size, d)
    return split.transpose(1, 2, 0, 3)


def heads_of(
    option: np.ndarray | None, sequence: int, num_heads_kv: int
) -> np.ndarray | None:
    """Return a sequence's option, (num_heads_kv, group_size).

    `option` is (num_heads_q,), or (batch, num_heads_q).
    """
    if option is None:
        return None
    option = np.asarray(option, np.float64)
    row = option if option.ndim == 1 else option[sequence]
    return row.reshape(num_heads_kv, len(row) // max(num_heads_kv, 1))


def append(
    cache: np.ndarray,
    at: Addresses,
    part: Sequence,
    new: np.ndarray,
    scale: np.ndarray | None,
) -> None:
    """Write a sequence's new tokens, (tokens, num_heads_kv, d), in place."""
    store(cache, at.of(part.number, part.before, part.stop), new, scale)


def cached(
    cache: np.ndarray,
    at: Addresses,
    part: Sequence,
    scale: np.ndarray | None,
) -> np.ndarray:
    """Return a sequence's tokens, (tokens, num_heads_kv, d)."""
    first = min(part.first, part.stop)
    return load(cache, at.of(part.number, first, part.stop), scale)


def forward_kvcache(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray | None = None,
    *,
    head_dim_v: int | None = None,
    cache_seqlens: np.ndarray | int | None = None,
    k_new: np.ndarray | None = None,
    v_new: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    rotary_cos: np.ndarray | None = None,
    rotary_sin: np.ndarray | None = None,
    rotary_interleaved: bool = False,
    cache_batch_idx: np.ndarray | None = None,
    cache_leftpad: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    causal: bool = False,
    window: Window = UNBOUNDED,
    alibi_slopes: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Append new tokens to the caches, then compute attention over them.

    Parameters
    ----------
    q : array_like, (batch, seqlen_q, num_heads_q, head_dim)
        Or packed, (total_q, num_heads_q, head_dim), with `cu_seqlens_q`.
    k_cache : ndarray, (slots, capacity, num_heads_kv, head_dim)
        Or (num_pages, page_size, num_heads_kv, head_dim), with `page_table`.
        Written in place.
    v_cache : ndarray, optional
        The same, with head_dim_v.
    head_dim_v : int, optional
        Without v_cache, as in latent attention: values are the first
        head_dim_v columns of keys, and of `k_new`.
    cache_seqlens : array_like of int, (batch,), or int, optional
        The tokens of each sequence before the call; not changed. Default:
        the capacity.
    k_new, v_new : array_like, (batch, seqlen_new, num_heads_kv, ...)
        Appended at `cache_seqlens`. Or packed by `cu_seqlens_q`, (total_q,
        num_heads_kv, ...). Require `cache_seqlens`.
    page_table : ndarray of int, (batch, max_pages), optional
        Entries beyond a sequence's last token are not read.
    rotary_cos, rotary_sin : array_like, (positions, rotary_dim / 2)
        Rotate q and k_new; see `rotary` and `query_positions`. Positions
        count from the start of the cache, also with `cache_leftpad`. Require
        `k_new`.
    rotary_interleaved : bool, optional
    cache_batch_idx : ndarray of int, (batch,), optional
        The slot of each sequence; b for sequence b by default.
    cache_leftpad : ndarray of int, (batch,), optional
        Tokens before it belong to no sequence.
    cu_seqlens_q : ndarray of int, (batch + 1,), optional
    k_scale, v_scale : ndarray, (num_heads_kv,) or (num_pages, num_heads_kv)
        A cached value is stored * scale.
    causal, window, sink
        See `options.Options`; sink is (num_heads_q,).
    alibi_slopes : ndarray, (num_heads_q,) or (batch, num_heads_q), optional
    **options
        scale and softcap; see `attention`.

    Returns
    -------
    out : ndarray of float64, like q with head_dim_v
    lse : ndarray of float64, (batch, num_heads_q, seqlen_q)
        Or (num_heads_q, total_q). A query that sees no key has out 0, lse
        -inf (with a sink, the sink), and so has one of no sequence.

    Raises
    ------
    ValueError
        If arguments do not go together, a length is negative or exceeds the
        capacity, or a slot or page is outside the cache.
    IndexError
        If a position is outside the rotary tables. Nothing is written after
        an error.
    """
    latent = v_cache is None
    if v_cache is None:
        v_cache = k_cache[..., :head_dim_v]
        v_scale = k_scale if v_scale is None else v_scale
    else:
        _check_values(k_new, v_new)
    _check_together(k_new, cache_seqlens, rotary_cos)
    if page_table is not None and not (
        cache_batch_idx is cache_leftpad is None
    ):
        raise ValueError("pages exclude cache_batch_idx and cache_leftpad")
    q = np.asarray(q, np.float64)
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    slots = np.arange(batch) if cache_batch_idx is None else cache_batch_idx
    at = Addresses(k_cache.shape[1], slots, page_table)
    lengths, leftpad = (
        np.broadcast_to(default if x is None else x, batch)
        for x, default in ((cache_seqlens, at.capacity), (cache_leftpad, 0))
    )
    parts = [*sequences(q, k_new, lengths, leftpad, cu_seqlens_q)]
    check_addresses(parts, at, len(k_cache))

    def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if rotary_cos is None or rotary_sin is None:
            return x
        tables = rotary_cos, rotary_sin
        return apply_rotary(x, *tables, positions, rotary_interleaved)

    queries = []
    for part in parts:
        rows = q[part.queries]
        positions = query_positions(len(rows), part.before, causal, window)
        queries.append(rotate(rows, positions))
    if k_new is not None:
        keys = [
            rotate(k_new[part.new], np.arange(part.before, part.stop))
            for part in parts
        ]
        for part, k in zip(parts, keys, strict=True):
            append(k_cache, at, part, k, k_scale)
            if v_new is not None and not latent:
                append(v_cache, at, part, v_new[part.new], v_scale)
    num_heads_kv = k_cache.shape[2]
    groups = num_heads_kv, q.shape[-2] // max(num_heads_kv, 1)
    head = np.arange(q.shape[-2]).reshape(groups)
    out = np.zeros((*q.shape[:-1], v_cache.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    for part, rows in zip(parts, queries, strict=True):
        number = part.number
        k = cached(k_cache, at, part, k_scale)
        v = cached(v_cache, at, part, v_scale)
        part_out, part_lse = attention(
            by_group(rows, num_heads_kv),
            by_group(k, num_heads_kv),
            by_group(v, num_heads_kv),
            causal=causal,
            window=window,
            alibi_slopes=heads_of(alibi_slopes, number, num_heads_kv),
            sink=heads_of(sink, number, num_heads_kv),
            head_indices=HeadIndices(number, head),
            heads_first=True,
            **options,
        )
        shape = rows.shape[:-1]
        out[part.queries] = part_out.transpose(2, 0, 1, 3).reshape(
            out[part.queries].shape
        )
        lse[part.queries] = part_lse.transpose(2, 0, 1).reshape(shape)
    return out, np.swapaxes(lse, -1, -2)


def _check_values(k_new: Any, v_new: Any) -> None:
    """Raise ValueError if new keys or values lack the others."""
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new require each other")


def _check_together(k_new: Any, cache_seqlens: Any, rotary_cos: Any) -> None:
    """Raise ValueError if an argument lacks another."""
    if k_new is not None and cache_seqlens is None:
        raise ValueError("k_new requires cache_seqlens")
    if rotary_cos is not None and k_new is None:
        raise ValueError("rotary_cos requires k_new")
