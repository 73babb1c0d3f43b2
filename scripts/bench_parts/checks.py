"""Checks the result of every cell before it is timed.

One head of one batch is computed twice on the GPU with CuPy: in float64, and
by plain attention in the dtype with float32 softmax and sums. The distance
between the two is the error of the dtype; a result may have twice that error
(gradients: three times), in the Euclidean norm, which so many elements make a
stable measure. In float32, plain matmuls may split long sums, which have a
smaller error than sequential sums: `lost_in_order` is added to the distance.

A GPU has nothing more precise than float64 to compare float64 with, and
tf32x3 rounds differently from plain float32. For these, each element must be
within its bound of docs/guide/accuracy.md.

The memory of the results is first filled with NaN, so that elements never
written are detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy

import bounded_attention
import dense_attention

from .cells import Cell
from .runners import Inputs, to_cupy

FACTORS = {"forward": 2, "backward": 3}
NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


class WrongResult(Exception):
    """A result beyond its bound; its call is not timed."""


def attend(cell: Cell, inputs: Inputs, wide, stored) -> tuple:
    """Return (out,) or (dq, dk, dv) of the last head of the last batch.

    dk and dv are those of its key head: sums over all its query heads.

    Parameters
    ----------
    wide : dtype
        The dtype of sums and of the softmax.
    stored : callable
        Rounds the arrays that plain code would store in the dtype.
    """
    backward = cell.direction == "backward"
    keywords = cell.keywords(cupy, inputs.q.dtype)
    k, v = (x[-1, :, -1].astype(wide) for x in (inputs.k, inputs.v))
    dk = dv = 0
    for head in range(-cell.group_size if backward else -1, 0):
        q, dout = (
            x[-1, :, head].astype(wide) for x in (inputs.q, inputs.dout)
        )
        found = dense_attention.attend(
            q, k, v, dout if backward else None,
            scale=cell.head_dim**-0.5, causal=cell.causal, stored=stored,
            options=options_of_head(keywords, head, cell.seqlen),
        )  # fmt: skip
        if backward:
            dk, dv = dk + found.dk, dv + found.dv
    if backward:
        return stored(found.dq), stored(dk), stored(dv)
    return (stored(found.out),)


def options_of_head(
    keywords: dict[str, Any], head: int, seqlen: int
) -> dense_attention.Options:
    """Return the options of one head of the last batch.

    Packed sequences are given as segments.
    """
    given = {
        name: keywords[name]
        for name in ("window", "softcap")
        if name in keywords
    }
    if "alibi_slopes" in keywords:
        given["slope"] = float(keywords["alibi_slopes"][head])
    if "sink" in keywords:
        given["sink"] = float(keywords["sink"][head])
    if "bias" in keywords:
        given["bias"] = keywords["bias"][0, 0]
    ids = None
    if "segment_ids_q" in keywords:
        ids = keywords["segment_ids_q"][-1]
    elif "cu_seqlens_q" in keywords:
        tokens = cupy.arange(seqlen, dtype=cupy.int32)
        ids = cupy.searchsorted(keywords["cu_seqlens_q"], tokens, "right")
    if ids is not None:
        given["segment_ids"] = ids, ids
    return dense_attention.Options(**given)


def attend_bounded(cell: Cell, inputs: Inputs, kind: str) -> list[tuple]:
    """Return (array, bounds) for each result of `attend`."""
    backward = cell.direction == "backward"
    found = [
        bounded_attention.attend(
            inputs.q[-1, :, head], inputs.k[-1, :, -1], inputs.v[-1, :, -1],
            inputs.dout[-1, :, head] if backward else None,
            scale=cell.head_dim**-0.5, causal=cell.causal, kind=kind,
            group=cell.group_size, xp=cupy,
        )
        for head in range(-cell.group_size if backward else -1, 0)
    ]  # fmt: skip
    last = list(zip(*found[-1], strict=True))  # out, lse, dq, dk, dv
    if not backward:
        return last[:1]
    return [last[2]] + [
        tuple(sum(x[i] for x in both) for both in zip(*found, strict=True))
        for i in (3, 4)
    ]


class Wanted(NamedTuple):
    """Return the expected result of the last head, and its error bound."""

    name: str
    over_bound: Callable[[cupy.ndarray], float]


def wanted(cell: Cell, inputs: Inputs, kind: str) -> list[Wanted]:
    """Return the expected results for a kind of check."""
    names = NAMES[cell.direction]
    if kind != "low":
        return [
            Wanted(
                name,
                lambda got, x=x: bounded_attention.over_bound(got, *x),
            )
            for name, x in zip(
                names, attend_bounded(cell, inputs, kind), strict=True
            )
        ]
    dtype = inputs.q.dtype

    def rounded(x):
        return x.astype(dtype).astype(cupy.float32)

    want = attend(cell, inputs, cupy.float64, lambda x: x)
    low = attend(cell, inputs, cupy.float32, rounded)
    more = lost_in_order(cell) if dtype == cupy.float32 else 0.0
    bounds = [
        FACTORS[cell.direction] * (distance(a, b) + more)
        for a, b in zip(low, want, strict=True)
    ]
    return [
        Wanted(name, lambda got, x=x, bound=bound: distance(got, x) / bound)
        for name, x, bound in zip(names, want, bounds, strict=True)
    ]


class Checker:
    """Checks the results of one cell, from any runner."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        self.cell, self.inputs = cell, inputs
        self._known: dict[str, list[Wanted]] = {}

    def check(
        self, name: str, results: tuple, kind: str | None = None
    ) -> float:
        """Return the largest error / bound; raise if above 1.

        Parameters
        ----------
        kind : str, optional
            The kind of check; default the cell's, `Cell.kind`.
        """
        kind = kind or self.cell.kind
        if kind not in self._known:
            self._known[kind] = wanted(self.cell, self.inputs, kind)
        worst = 0.0
        for (what, over_bound), array in zip(
            self._known[kind], map(to_cupy, results), strict=True
        ):
            if not cupy.isfinite(array.astype(cupy.float32)).all():
                raise WrongResult(f"{name}, {self.cell}: {what} has NaN")
            whole = array[-1] if array.ndim == 4 else array  # packed
            ratio = over_bound(whole[:, -1])
            if not ratio <= 1:
                raise WrongResult(
                    f"{name}, {self.cell}: {what} is off by {ratio:.2g} "
                    f"times its bound"
                )
            worst = max(worst, ratio)
        return worst


def lost_in_order(cell: Cell) -> float:
    """Return the relative error of a sequential float32 sum.

    For n terms of either sign and of standard deviation s, the sum of the
    first k is about s sqrt(k). Rounding it has an error of at most u times
    that, with u = 2^-24, and u s sqrt(k / 3) in the root mean square; all n
    roundings have u s n / sqrt(6), and the whole sum is s sqrt(n). out and dq
    are sums over keys, dk and dv over the queries of a group of heads.
    """
    terms = cell.seqlen
    if cell.direction == "backward":
        terms *= cell.group_size
    return 2.0**-24 * math.sqrt(terms / 6)


def distance(array: cupy.ndarray, want: cupy.ndarray) -> float:
    """Return |array - want| / |want|, Euclidean, in float64."""
    difference = array.astype(cupy.float64) - want
    return float(cupy.linalg.norm(difference) / cupy.linalg.norm(want))


def poison(nbytes: int) -> None:
    """Leave NaN-filled blocks in CuPy's pool for the next results."""
    blocks = [cupy.full(nbytes, 0xFF, cupy.uint8) for _ in range(4)]
    del blocks
