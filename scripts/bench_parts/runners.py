"""Runners: cuflash, and the type of a peer (see peers.py).

All read the same memory. A runner makes, from a set of inputs, a function that
queues one call on the null stream and returns its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import ml_dtypes
import numpy as np

import cuflash

from .cells import Cell

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


class Inputs(NamedTuple):
    """CuPy arrays, (batch, seqlen, heads, head_dim)."""

    q: cupy.ndarray
    k: cupy.ndarray
    v: cupy.ndarray
    dout: cupy.ndarray


def make_inputs(cell: Cell, seed: int) -> Inputs:
    """Draw standard normal inputs; zeros would run faster than real data."""
    random = cupy.random.default_rng(seed)
    drawn = cupy.float64 if cell.dtype == "float64" else cupy.float32
    shapes = cell.shape, cell.shape_kv, cell.shape_kv, cell.shape
    return Inputs(
        *(
            random.standard_normal(shape, drawn).astype(
                DTYPES[cell.dtype], copy=False
            )
            for shape in shapes
        )
    )


class Runner(NamedTuple):
    """An implementation to time.

    Attributes
    ----------
    name, label : str
        A short name for columns and JSON, and a description.
    prepare : callable
        Maps (cell, inputs) to a function without arguments.
    context : callable
        Makes the context manager for its calls.
    variant : callable
        Maps a cell to the cell that it runs instead.
    wait : callable or None
        Waits for all queued calls, if the runner uses its own streams. Its
        calls are then timed by the host's clock, many at a time.
    kind : callable
        Maps a cell to the kind of check: see `Cell.kind`.
    """

    name: str
    label: str
    prepare: Callable[[Cell, Inputs], Callable[[], tuple]]
    context: Callable[[], Any] = contextlib.nullcontext
    variant: Callable[[Cell], Cell] = lambda cell: cell
    wait: Callable[[], Any] | None = None
    kind: Callable[[Cell], str] = lambda cell: cell.kind


def _prepare_cuflash(cell: Cell, inputs: Inputs) -> Callable[[], tuple]:
    options = cell.keywords(cupy, inputs.q.dtype)
    if "cu_seqlens_q" in options:  # packed sequences have no batch
        inputs = Inputs(*(x[0] for x in inputs))
    q, k, v, dout = inputs

    def forward():
        # With lse, which the peers always write.
        return cuflash.forward(q, k, v, **options, return_lse=True)

    if cell.direction == "forward":
        return lambda: forward()[:1]
    out, lse = forward()
    return lambda: cuflash.backward(dout, q, k, v, out, lse, **options)


OURS = Runner("cuflash", f"cuflash {cuflash.__version__}", _prepare_cuflash)

PLAIN = Runner(
    "plain",
    "cuflash without the option",
    _prepare_cuflash,
    variant=lambda cell: cell.plain,  # of option_cells.py
)

# cuflash on a call that should be about as fast.
VARIANTS = {
    "mha": Runner(
        "mha",
        "cuflash with a key head for each query head",
        _prepare_cuflash,
        variant=lambda cell: replace(cell, kv_heads=None),
    ),
    "bfloat16": Runner(
        "bfloat16",
        "cuflash in bfloat16",
        _prepare_cuflash,
        variant=lambda cell: replace(cell, dtype="bfloat16", precision=None),
    ),
}


def to_cupy(array: Any) -> cupy.ndarray:
    """Return a result as a CuPy array, without a copy."""
    if isinstance(array, cupy.ndarray):
        return array
    detach = getattr(array, "detach", None)  # PyTorch's
    return cupy.from_dlpack(detach() if detach else array)
