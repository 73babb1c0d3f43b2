"""Data that punishes: values with which a small fault makes a large error.

Each function makes q, k, v and dout of one head, (rows, columns), from random
numbers and a `Head`. They keep within float16's range, and differ from row to
row and from key to key, so that roundings do too: rounding.py's roots of
squares hold for them as they do for normal numbers. Except where weights of
`rising` differ by less than a unit of a 16-bit type: see there.
"""

from typing import NamedTuple

import numpy as np

from .dtypes import PRECISION

# Where tiles, fragments and parts of them begin and end.
EDGES = [0, 15, 16, 31, 32, 63, 64, 127, 128, -1]
LARGEST = 64.0  # of an element of q, whatever the scale


class Head(NamedTuple):
    """Sizes of a head, the scale of its scores, the dtype of its arrays."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    dtype: str

    def normal(self, rng):
        n, m, d, e = self[:4]
        shapes = (n, d), (m, d), (m, e), (n, e)
        return [rng.standard_normal(shape) for shape in shapes]

    def unscaled(self, score):
        """Return the product of a query and a key that has that score.

        Or, with a scale that is too small for it, as much as there may be.
        """
        if self.scale == 0:
            return np.full_like(score, LARGEST)
        most = LARGEST * abs(self.scale)
        return np.clip(score, -most, most) / self.scale

    def places(self):
        """Return the keys at edges, in a list that has at least one."""
        n = max(self.seqlen_k, 1)
        return sorted({x % n for x in EDGES if x < n})


def peaked(rng, head):
    """Each row has a winner: the first or last key, one at an edge."""
    q, k, v, dout = head.normal(rng)
    if k.size:
        k /= np.sqrt((k**2).mean(axis=-1, keepdims=True))
        places = np.resize(rng.permutation(head.places()), len(q))
        q = k[places] * head.unscaled(16.0 / head.head_dim)
    return q, k, v, dout


def rising(rng, head):
    """Maxima rise with each key, by 2^-7 to 2^-10 within 64 keys, as v does.

    Older sums have a factor of 0.992 and more, which is still one.
    """
    q, k, v, dout = head.normal(rng)
    place = np.arange(head.seqlen_k)[:, None] / max(head.seqlen_k, 1)
    rise = 2.0 ** -rng.integers(7, 10) * rng.uniform(0.5, 1, len(q))
    q *= 2.0**-12
    q[:, 0] = head.unscaled(rise * head.seqlen_k / 64)
    k[:, 0] = place[:, 0]
    return q, k, v / 4 + 4 * (place - 0.5), dout


def jump(rng, head):
    """Maxima jump once, at an edge: the sums before count for nothing."""
    q, k, v, dout = head.normal(rng)
    q[:, 0] = head.unscaled(rng.choice([8.0, 30.0], len(q)))
    k[:, 0] = np.arange(head.seqlen_k) >= rng.choice(head.places())
    return q, k, v, dout


def attained(rng, head):
    """Rows of dq attain Cauchy and Schwarz: every |dP| is |dO||V|.

    A key's sign is its value's too, so that delta is small and all terms of dq
    have one sign. The first column of q and k alone makes the weights differ.
    For head dimensions that are powers of two, 1.75 makes the bound all but
    the next power of two, on which integer sums build their grid.
    """
    q, k, v, dout = head.normal(rng)
    sign = rng.choice([-1.0, 1.0], (head.seqlen_k, 1))
    q[:, 1:] *= 2.0**-12
    k[:, 1:] = sign * rng.choice([-1.0, 1.0], k.shape[1] - 1)
    k[:, 0] = rng.uniform(-1, 1, len(k))
    column = rng.choice([-1.0, 1.0], v.shape[1])
    v = sign * column
    dout = 1.75 * column * 2.0 ** rng.integers(-3, 4, (len(q), 1))
    return q, k, v, dout


def cancelling(rng, head):
    """Sums far smaller than their terms: pairs of keys, of columns."""
    q, k, v, dout = head.normal(rng)
    for x in (k, v):
        ahead, behind = x[0::2], x[1::2]
        size = 1 if x is k else -1
        behind *= 2.0**-6
        behind += size * ahead[: len(behind)]
    q[:, 1::2] = q[:, 0 : 2 * (q.shape[1] // 2) : 2]
    k[:, 1::2] *= 2.0**-6
    k[:, 1::2] -= k[:, 0 : 2 * (k.shape[1] // 2) : 2]
    return 4 * q, k, v, dout


def large_row(rng, head):
    """One row of one array is 2^10 times as large as others."""
    arrays = head.normal(rng)
    chosen = arrays[rng.integers(4)]
    chosen /= 32
    if len(chosen):
        chosen[rng.integers(len(chosen))] *= 1024
    return arrays


def large_column(rng, head):
    """One column of one array is 2^10 times as large as others."""
    arrays = head.normal(rng)
    chosen = arrays[rng.integers(4)]
    chosen /= 32
    chosen[:, rng.integers(chosen.shape[1])] *= 1024
    return arrays


def between(rng, head):
    """Values are neighbours in the dtype: out is between, at times halfway.

    How many of a column are the larger one differs, and so do roundings. The
    reference is float64 too, so that float64's neighbours are 2^-40 apart.
    """
    q, k, v, dout = head.normal(rng)
    ulp = max(2 * PRECISION[head.dtype].unit, 2.0**-40)  # from 1 on
    base = 1 + rng.integers(0, 100, v.shape[1]) * ulp
    v = base + ulp * (rng.random(v.shape) < rng.random(v.shape[1]))
    return q, k, v, dout


def aligned(rng, head):
    """All components are positive: sums grow with each term."""
    return [abs(x) for x in head.normal(rng)]


KINDS = (
    peaked,
    rising,
    jump,
    attained,
    cancelling,
    large_row,
    large_column,
    between,
    aligned,
)


def of_heads(rng, shapes, scale, dtype, first, count):
    """Return q, k, v and dout in the public layout, of one kind a key head.

    The query heads of a group are further rows. Key heads have KINDS[first]
    and up to `count` in turn.
    """
    batch, seqlen_q, heads, head_dim = shapes["q"]
    _, seqlen_k, heads_kv, head_dim_v = shapes["v"]
    group = heads // heads_kv
    arrays = {name: np.empty(shape) for name, shape in shapes.items()}
    head = Head(seqlen_q * group, seqlen_k, head_dim, head_dim_v, scale, dtype)
    for i in range(batch * heads_kv):
        b, h = divmod(i, heads_kv)
        make = KINDS[(first + i % count) % len(KINDS)]
        for name, x in zip(shapes, make(rng, head), strict=True):
            if name in ("k", "v"):
                arrays[name][b, :, h] = x
            else:
                rows = x.reshape(seqlen_q, group, x.shape[-1])
                arrays[name][b, :, h * group : (h + 1) * group] = rows
    return list(arrays.values())
