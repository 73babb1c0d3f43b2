"""Checks the result of every decode call before it is timed.

A few heads are computed in float64, and as plain attention in the dtype, by
the rule of checks.py: a result may have twice the error of the second, in the
Euclidean norm over these heads. Every element must be finite.
"""

from __future__ import annotations

from collections.abc import Callable

import cupy

import dense_attention

from .checks import FACTORS, WrongResult, distance
from .decode import DecodeCell
from .runners import Inputs, to_cupy


def heads_of(cell: DecodeCell) -> list[tuple[int, int]]:
    """Return the checked (batch, query head) pairs: corners and a middle."""
    batches = 0, cell.batch - 1
    heads = 0, cell.group_size - 1, cell.heads_q - 1
    pairs = {(batch, head) for batch in batches for head in heads}
    return sorted(pairs | {(cell.batch // 2, cell.heads_q // 2)})


def attend(cell: DecodeCell, inputs: Inputs, wide, stored) -> cupy.ndarray:
    """Return the rows of out of `heads_of`, (heads, head_dim).

    Parameters
    ----------
    wide : dtype
        The dtype of sums and of the softmax.
    stored : callable
        Rounds the arrays that plain code would store in the dtype.
    """
    rows = []
    for batch, head in heads_of(cell):
        own = head // cell.group_size
        found = dense_attention.attend(
            inputs.q[batch, :, head].astype(wide),
            inputs.k[batch, :, own].astype(wide),
            inputs.v[batch, :, own].astype(wide),
            scale=cell.head_dim**-0.5, causal=False, stored=stored,
        )  # fmt: skip
        rows.append(stored(found.out))
    return cupy.concatenate(rows)


def checker(cell: DecodeCell, inputs: Inputs) -> Callable[[str, tuple], float]:
    """Return a check of (out,): error / bound, or an exception if above 1."""
    dtype = inputs.q.dtype
    want = attend(cell, inputs, cupy.float64, lambda x: x)
    low = attend(
        cell,
        inputs,
        cupy.float32,
        lambda x: x.astype(dtype).astype(cupy.float32),
    )
    bound = FACTORS["forward"] * distance(low, want)

    def check(name: str, results: tuple) -> float:
        (out,) = map(to_cupy, results)
        if not cupy.isfinite(out.astype(cupy.float32)).all():
            raise WrongResult(f"{name}, {cell}: out has NaN")
        got = cupy.stack(
            [
                out[batch, 0, head].astype(cupy.float64)
                for batch, head in heads_of(cell)
            ]
        )
        ratio = distance(got, want) / bound
        if not ratio <= 1:
            raise WrongResult(
                f"{name}, {cell}: out is off by {ratio:.2g} times its bound"
            )
        return ratio

    return check


def poison(results: tuple) -> None:
    """Fill results with NaN; each is one block of memory."""
    for array in map(to_cupy, results):
        array.data.memset_async(0xFF, array.nbytes)
