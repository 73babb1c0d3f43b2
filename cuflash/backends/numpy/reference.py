"""Rows of NumPy calls by the reference, in float64.

For those that are flagged (`numpy_flagged`): the semantics of NaN and
infinities. Arrays are those of `numpy_tiles`, of which `Rows` takes its own;
options are the rows' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.backends.numpy.rows import Rows
from cuflash.backends.numpy.tangents import Direction, SecondGradients
from cuflash.reference import backward as backward_of
from cuflash.reference import double_backward as double_backward_of
from cuflash.reference import forward as forward_of
from cuflash.reference import jvp as jvp_of

REFERENCE_BLOCK = 128  # rows of a tile
PAIRS = 128 * 128  # of a tile: its scores in float64 are 128 KiB
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def forward(
    rows: Rows,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    scale: float,
) -> None:
    """Write the rows of out and lse."""
    q = rows.rows_of(q)
    k, v = (_for_groups(rows.keys_of(x), q) for x in (k, v))
    found = forward_of.query_outer(q, k, v, **_options(rows, q, scale))
    for result, own in zip((out, lse), found, strict=True):
        rows.write(result, own)


def backward(
    rows: Rows,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    scale: float,
    gradients: Sequence[np.ndarray],
) -> None:
    """Write the rows of dq, and add to the other gradients.

    gradients : dq, dk, dv, and those of a bias and of a sink.
    """
    dout, q, out, lse = map(rows.rows_of, (dout, q, out, lse))
    dlse = None if dlse is None else rows.rows_of(dlse)
    k, v = (_for_groups(rows.keys_of(x), q) for x in (k, v))
    options = _options(rows, q, scale)
    if lse.dtype == np.float32:
        lse = _unrounded(lse.astype(np.float64), q, k, options)
    dq, dk, dv, *others = backward_of.key_outer(
        dout, q, k, v, out, lse, dlse=dlse, **options
    )
    rows.write(gradients[0], dq)
    rows.add(gradients[1], _of_groups(dk))
    rows.add(gradients[2], _of_groups(dv))
    names = [x for x in ("bias", "sink") if x in options]
    for name, total, own in zip(names, gradients[3:], others, strict=True):
        (rows.add_pairs if name == "bias" else rows.add)(total, own)


def jvp(
    rows: Rows,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    directions: list[Direction],
    results: tuple[Any, ...],
    scale: float,
) -> None:
    """Write the rows of out, lse and their tangents.

    results : see `numpy_tangents.jvp`.
    """
    q = rows.rows_of(q)
    k, v = (_for_groups(rows.keys_of(x), q) for x in (k, v))
    options = _options(rows, q, scale)
    out, lse, out_dot, lse_dot = results
    if not directions:
        found = forward_of.query_outer(q, k, v, **options)
        rows.write(out, found[0])
        rows.write(lse, found[1])
    for number, direction in enumerate(directions):
        moved = rows.direction_of(direction)
        tangents = jvp_of.jvp(
            *(q, k, v, moved.q, moved.k, moved.v),
            bias_dot=moved.bias,
            sink_dot=moved.sink,
            **options,
        )
        of_number = out, lse, out_dot[number], lse_dot[number]
        for result, own in zip(of_number, tangents, strict=True):
            rows.write(result, own)


def double_backward(
    rows: Rows,
    direction: Direction,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None,
    scale: float,
    gradients: SecondGradients,
) -> None:
    """Write the rows of d2q, ddout and ddlse; add to the other gradients."""
    moved = rows.direction_of(direction)
    dout, q, out, lse = map(rows.rows_of, (dout, q, out, lse))
    dlse = None if dlse is None else rows.rows_of(dlse)
    k, v = (_for_groups(rows.keys_of(x), q) for x in (k, v))
    options = _options(rows, q, scale)
    if lse.dtype == np.float32:
        lse = _unrounded(lse.astype(np.float64), q, k, options)
    found = double_backward_of.double_backward(
        *(moved.q, moved.k, moved.v, dout, q, k, v, out, lse),
        ddbias=moved.bias,
        ddsink=moved.sink,
        dlse=dlse,
        **options,
    )
    for name in ("d2q", "ddout", "ddlse"):
        rows.write(getattr(gradients, name), getattr(found, name))
    rows.add(gradients.d2k, _of_groups(found.d2k))
    rows.add(gradients.d2v, _of_groups(found.d2v))
    if gradients.d2bias is not None and found.d2bias is not None:
        rows.add_pairs(gradients.d2bias, found.d2bias)
    if gradients.d2sink is not None and found.d2sink is not None:
        rows.add(gradients.d2sink, found.d2sink)


def _options(rows: Rows, q: np.ndarray, scale: float) -> dict[str, Any]:
    """The keyword arguments of the reference."""
    few = min(q.shape[-2], REFERENCE_BLOCK)
    blocks = {"block_q": REFERENCE_BLOCK, "block_k": PAIRS // few}
    options = {"scale": scale, **blocks, **rows.options}
    if q.dtype == np.float32:
        options["largest_score"] = LARGEST_FLOAT32
    return options


def _of_groups(x: np.ndarray) -> np.ndarray:
    """The sum over the query heads of a group."""
    return x.sum(axis=2, keepdims=True)


def _for_groups(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keys or values, in float64, broadcast along the axis of a group."""
    # Converted before broadcasting: converting a broadcast array copies it.
    shape = (*q.shape[:3], *x.shape[3:])
    return np.broadcast_to(x.astype(np.float64, copy=False), shape)


def _unrounded(
    lse: np.ndarray, q: np.ndarray, k: np.ndarray, options: dict
) -> np.ndarray:
    """Undo the rounding of lse to float32 if these keys reproduce it.

    In P = exp(S - lse), the absolute error of lse becomes a relative error of
    P: 1e-3 at scores of 1e4, and no correct digit at 1e30. So lse is
    recomputed, and the result is used if it equals the caller's within a
    float32 ulp. It differs if the caller's lse covers more keys than these;
    the caller's is used then.
    """
    no_values = k[..., :0]
    _, exact = forward_of.query_outer(q, k, no_values, **options)
    ulp = np.spacing(np.abs(lse).astype(np.float32))
    return np.where(np.abs(exact - lse) <= ulp, exact, lse)
