"""Attention of one head in float64, with error bounds.

Computes the bounds of docs/guide/accuracy.md for given inputs: one for each
element of out, lse, dq, dk and dv. bench.py and sweep_blocks.py use it where
plain attention in the dtype is no yardstick: for float64, which is as exact
as the reference, and for float32 with precision="tf32x3".

Works with NumPy or CuPy, in chunks of rows, so that long sequences fit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from cuflash.check.bounds import (
    ARITHMETIC,
    EXP,
    PER_TILE,
    SMALLEST_BLOCK,
    Arithmetic,
)

ROWS = 1024  # of scores in a chunk


class Results(NamedTuple):
    """Results of one head: (tokens, columns) arrays, and lse (tokens,)."""

    out: Any
    lse: Any
    dq: Any = None
    dk: Any = None
    dv: Any = None


def over_bound(got: Any, want: Any, bound: Any) -> float:
    """Return the largest error / bound; above 1 for NaN and wrong -inf."""
    got = got.astype(want.dtype)
    wrong = got != want  # both may be -inf
    if not wrong.any():
        return 0.0
    return float((abs(got[wrong] - want[wrong]) / bound[wrong]).max())


def attend(
    q: Any,
    k: Any,
    v: Any,
    dout: Any = None,
    *,
    scale: float,
    causal: bool,
    kind: str,
    group: int = 1,
    xp: ModuleType,
) -> tuple[Results, Results]:
    """Compute attention of one head, its gradients if `dout`, and bounds.

    The computation is in float64 and has an error too, which the analysis in
    docs/guide/accuracy.md bounds as well (P is computed without lse here,
    which errs less). So each bound is the sum of two: of the kind, and of
    float64.

    Parameters
    ----------
    q, k, v, dout : array, (tokens, columns)
    kind : str
        One of `ARITHMETIC`: the arithmetic of the results to be checked.
    group : int
        Number of query heads that dk and dv sum over; their bounds add up.
    xp : module
        The arrays' library, NumPy or CuPy.

    Returns
    -------
    results, bounds : Results
    """
    q, k, v = (x.astype(xp.float64) for x in (q, k, v))
    kinds = ARITHMETIC[kind], ARITHMETIC["float64"]
    chunks = []
    for start in range(0, len(q), ROWS):
        rows = slice(start, start + ROWS)
        last_seen = xp.arange(len(q))[rows, None] + len(k) - len(q)
        see = (xp.arange(len(k)) <= last_seen) | (not causal)
        part = None if dout is None else dout[rows].astype(xp.float64)
        x = _Rows(q[rows], k, v, part, see, scale, xp)
        bounds = [x.bounds(a, len(q) * group) for a in kinds]
        chunks.append((x.results(), _added(bounds)))
    results, bounds = zip(*chunks, strict=True)
    return _joined(results, xp), _joined(bounds, xp)


def _added(parts: Any) -> Results:
    return Results(*map(_sum, zip(*parts, strict=True)))


def _sum(arrays: tuple) -> Any:
    return None if arrays[0] is None else sum(arrays)


def _joined(chunks: Any, xp: ModuleType) -> Results:
    """Concatenate results per query row; add those summed over queries."""
    out, lse, dq, dk, dv = zip(*chunks, strict=True)
    return Results(
        xp.concatenate(out),
        xp.concatenate(lse),
        None if dq[0] is None else xp.concatenate(dq),
        _sum(dk),
        _sum(dv),
    )


class _Rows:
    """Attend from a chunk of queries; names as in docs/guide/accuracy.md."""

    def __init__(self, q, k, v, dout, see, scale, xp):
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.scale, self.xp = scale, xp
        s = q @ k.T * scale
        m = xp.where(see, s, -xp.inf).max(axis=1, keepdims=True)
        blind = m == -xp.inf  # a row that sees no key
        self.m = xp.where(blind, 0, m)
        self.p = xp.exp(xp.where(see, s - self.m, -xp.inf))
        self.s = xp.where(see, s, 0)
        total = xp.where(blind, 1, self.p.sum(axis=1, keepdims=True))
        self.p /= total
        self.lse = self.m + xp.log(total)  # 0 where it should be -inf
        self.blind = blind
        self.out = self.p @ v
        if dout is not None:
            part = dout @ v.T - (dout * self.out).sum(axis=1, keepdims=True)
            self.ds = scale * self.p * part

    def results(self) -> Results:
        lse = self.xp.where(self.blind, -self.xp.inf, self.lse)[:, 0]
        if self.dout is None:
            return Results(self.out, lse)
        return Results(
            self.out, lse, self.ds @ self.k, self.ds.T @ self.q,
            self.p.T @ self.dout,
        )  # fmt: skip

    def bounds(self, kind: Arithmetic, queries: int) -> Results:
        """Return the bounds; `queries` counts the terms of dk and dv."""
        u, product = kind.unit, kind.product
        q, k, v = (abs(x) for x in (self.q, self.k, self.v))
        p, s, m, row = self.p, abs(self.s), abs(self.m), abs(self.lse)
        sums = product(len(k)) + PER_TILE * -(-len(k) // SMALLEST_BLOCK) * u
        sigma = product(q.shape[1]) * abs(self.scale) * (q @ k.T)

        weights = p * (sigma + 6 * u * (s + m) + EXP * u)
        of_row = weights.sum(axis=1, keepdims=True)
        out = weights @ v + sums * (p @ v)
        out += (of_row + sums + 2 * u) * abs(self.out)
        lse = of_row + sums + 4 * u * (row + m)
        if self.dout is None:
            return Results(out, lse[:, 0])

        dout, size_ds = abs(self.dout), abs(self.ds)
        eta = sigma + lse + EXP * u
        eta += 3 * u * (s + row + abs(self.s - self.lse))
        columns = product(v.shape[1])
        delta = dout * (out + columns * abs(self.out))
        pi = columns * (dout @ v.T) + delta.sum(axis=1, keepdims=True)
        ds = (eta + 5 * u) * size_ds + abs(self.scale) * p * pi
        many = product(queries) + u
        return Results(
            out,
            lse[:, 0],
            (ds + sums * size_ds) @ k,
            (ds + many * size_ds).T @ q,
            (p * (eta + many)).T @ dout,
        )
