"""Checks the result of every cell before it is timed.

One head of one batch is computed whole, twice, on the GPU with CuPy: in
float64, and as plain attention in the dtype with float32 softmax and sums.
The second one's distance from the first is what the dtype costs; a result
may be off by twice (gradients: three times) as much, in the Euclidean norm,
in which so many elements leave no room for luck. In float32 its products may
split their long sums, and lose less than sums in order do: `lost_in_order` is
added to its distance.

float64 has nothing finer on a GPU to be compared with, and float32 in parts
errs in other ways than plain float32. There each element may be off by the
bound of docs/guide/accuracy.md.

Memory that results will lie in is filled with NaN before, so elements that
nobody writes show.
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
    """A result that must not be timed."""


def attend(cell: Cell, inputs: Inputs, wide, stored) -> tuple:
    """Return (out,) or (dq, dk, dv) of the last head of the last batch.

    dk and dv are those of its key head: sums over all heads that read it.

    Parameters
    ----------
    wide : dtype
        Of sums and of the softmax.
    stored : callable
        Rounds what plain code would keep in the dtype.
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
    """The options of one head of the last batch.

    Packed sequences see what segments see, each from its own first token.
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
    """Return (array, its bounds) for what `attend` returns."""
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
    """The expected result of the last head, and its error bound."""

    name: str
    over_bound: Callable[[cupy.ndarray], float]


def wanted(cell: Cell, inputs: Inputs, kind: str) -> list[Wanted]:
    """The expected results for a kind of check."""
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
        """Return the largest error over its bound; raise if beyond 1.

        Parameters
        ----------
        kind : str, optional
            What they are judged by, if not by the cell's own: `Cell.kind`.
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
                    f"times what is allowed"
                )
            worst = max(worst, ratio)
        return worst


def lost_in_order(cell: Cell) -> float:
    """Return how far off a float32 sum in order is, relative to its size.

    Of n terms without a common sign, of standard deviation s: the sum of the
    first k is s sqrt(k) in size. Rounding it errs by at most u times that, u
    being 2^-24, and by u s sqrt(k / 3) in the root mean square; all n of them
    by u s n / sqrt(6), where the whole sum is s sqrt(n). out and dq are sums
    over keys, dk and dv over the queries of a group of heads.
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
