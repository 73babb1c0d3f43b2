"""Is a result right? Asked of every cell before it is timed.

One head of one batch is computed whole, twice, on the GPU with CuPy: in
float64, and as plain attention in the dtype with float32 softmax and sums.
The second one's distance from the first is what the dtype costs; a result
may be off by twice (gradients: three times) as much, in the Euclidean norm,
in which so many elements leave no room for luck. Memory that results will
lie in is filled with NaN before, so elements that nobody writes show.
"""

from __future__ import annotations

import cupy

from .cells import Cell
from .runners import Inputs, to_cupy

FACTORS = {"forward": 2, "backward": 3}
ROWS = 2048  # of a chunk of the matrix of scores


class WrongResult(Exception):
    """A result that must not be timed."""


def attend(cell: Cell, inputs: Inputs, wide, stored) -> tuple:
    """Return (out,) or (dq, dk, dv) of the last head of the last batch.

    Parameters
    ----------
    wide : dtype
        Of sums and of the softmax.
    stored : callable
        Rounds what plain code would keep in the dtype.
    """
    q, k, v, dout = (x[-1, :, -1].astype(wide) for x in inputs)
    scale = cell.head_dim**-0.5
    backward = cell.direction == "backward"
    firsts, dk, dv = [], cupy.zeros_like(k), cupy.zeros_like(v)
    keys = cupy.arange(cell.seqlen)
    for start in range(0, cell.seqlen, ROWS):
        rows = slice(start, start + ROWS)
        s = q[rows] @ k.T * scale
        if cell.causal:
            s[keys > keys[rows, None]] = -cupy.inf
        p = cupy.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p = stored(p)
        if not backward:
            firsts.append(p @ v)
            continue
        dp = stored(dout[rows] @ v.T)
        ds = stored(p * (dp - (p * dp).sum(axis=1, keepdims=True)))
        firsts.append(scale * (ds @ k))
        dk += scale * (ds.T @ q[rows])
        dv += p.T @ dout[rows]
    first = stored(cupy.concatenate(firsts))
    return (first, stored(dk), stored(dv)) if backward else (first,)


class Checker:
    """Checks the results of one cell, whoever computed them."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        dtype = inputs.q.dtype

        def rounded(x):
            return x.astype(dtype).astype(cupy.float32)

        self.cell = cell
        self.want = attend(cell, inputs, cupy.float64, lambda x: x)
        low = attend(cell, inputs, cupy.float32, rounded)
        self.bounds = [
            FACTORS[cell.direction] * distance(a, b)
            for a, b in zip(low, self.want, strict=True)
        ]

    def check(self, name: str, results: tuple) -> float:
        """Return the largest error over its bound; raise if beyond 1."""
        worst = 0.0
        names = ("out",) if len(results) == 1 else ("dq", "dk", "dv")
        for what, array, want, bound in zip(
            names,
            map(to_cupy, results),
            self.want,
            self.bounds,
            strict=True,
        ):
            if not cupy.isfinite(array.astype(cupy.float32)).all():
                raise WrongResult(f"{name}, {self.cell}: {what} has NaN")
            error = distance(array[-1, :, -1], want)
            if not error <= bound:
                raise WrongResult(
                    f"{name}, {self.cell}: {what} is off by {error:.2g}, "
                    f"allowed {bound:.2g}"
                )
            worst = max(worst, error / bound)
        return worst


def distance(array: cupy.ndarray, want: cupy.ndarray) -> float:
    """Return |array - want| / |want|, Euclidean, in float64."""
    difference = array.astype(cupy.float64) - want
    return float(cupy.linalg.norm(difference) / cupy.linalg.norm(want))


def poison(nbytes: int) -> None:
    """Leave blocks full of NaN in CuPy's pool, for the next results."""
    blocks = [cupy.full(nbytes, 0xFF, cupy.uint8) for _ in range(4)]
    del blocks
