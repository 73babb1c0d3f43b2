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

import dense_attention

from .cells import Cell
from .runners import Inputs, to_cupy

FACTORS = {"forward": 2, "backward": 3}


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
    k, v = (x[-1, :, -1].astype(wide) for x in (inputs.k, inputs.v))
    dk = dv = 0
    for head in range(-cell.group_size if backward else -1, 0):
        q, dout = (
            x[-1, :, head].astype(wide) for x in (inputs.q, inputs.dout)
        )
        found = dense_attention.attend(
            q, k, v, dout if backward else None,
            scale=cell.head_dim**-0.5, causal=cell.causal, stored=stored,
        )  # fmt: skip
        if backward:
            dk, dv = dk + found.dk, dv + found.dv
    if backward:
        return stored(found.dq), stored(dk), stored(dv)
    return (stored(found.out),)


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
