"""Parts of NumPy calls by the reference, in float64.

For inputs that are UNBOUNDED (`numpy_kinds.Kind`): the semantics of NaN and
infinities. Arrays are those of `numpy_tiles`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.reference import backward as backward_of
from cuflash.reference import double_backward as double_backward_of
from cuflash.reference import forward as forward_of
from cuflash.reference import jvp as jvp_of

from .numpy_tangents import Direction

REFERENCE_BLOCK = 128  # a tile's scores in float64 are 128 KiB
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    **options: Any,
) -> None:
    """Forward in float64, with the semantics of NaN and infinities."""
    k, v = (_for_groups(x, q) for x in (k, v))
    options = _of_reference(q, options)
    out[...], lse[...] = forward_of.query_outer(q, k, v, **options)


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | None,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Backward in float64, with the semantics of NaN and infinities."""
    k, v = (_for_groups(x, q) for x in (k, v))
    options = _of_reference(q, options)
    if lse.dtype == np.float32:
        lse = _unrounded(lse.astype(np.float64), q, k, options)
    dq, dk, dv, *rest = backward_of.key_outer(
        dout, q, k, v, out, lse, dlse=dlse, **options
    )
    dk, dv = (x.sum(axis=2, keepdims=True) for x in (dk, dv))
    return (dq, dk, dv, *rest)


def jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    directions: list[Direction],
    results: tuple[Any, ...],
    **options: Any,
) -> None:
    """Write out, lse and their tangents: see `numpy_tangents.jvp`."""
    k, v = (_for_groups(x, q) for x in (k, v))
    options = _of_reference(q, options)
    out, lse, out_dot, lse_dot = results
    if not directions:
        out[...], lse[...] = forward_of.query_outer(q, k, v, **options)
    for number, moved in enumerate(directions):
        bias_dot, sink_dot = moved.bias, moved.sink
        out[...], lse[...], out_dot[number][...], lse_dot[number][...] = (
            jvp_of.jvp(
                *(q, k, v, moved.q, moved.k, moved.v),
                bias_dot=bias_dot,
                sink_dot=sink_dot,
                **options,
            )
        )


def double_backward(
    direction: Direction,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dlse: np.ndarray | None,
    **options: Any,
) -> double_backward_of.SecondGradients:
    """Return the gradients: see `numpy_tangents.double_backward`."""
    k, v = (_for_groups(x, q) for x in (k, v))
    options = _of_reference(q, options)
    if lse.dtype == np.float32:
        lse = _unrounded(lse.astype(np.float64), q, k, options)
    found = double_backward_of.double_backward(
        *(direction.q, direction.k, direction.v),
        *(dout, q, k, v, out, lse),
        ddbias=direction.bias,
        ddsink=direction.sink,
        dlse=dlse,
        **options,
    )
    d2k, d2v = (x.sum(axis=2, keepdims=True) for x in (found.d2k, found.d2v))
    return found._replace(d2k=d2k, d2v=d2v)


def _of_reference(q: np.ndarray, options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    for name in ("block_q", "block_k"):
        options[name] = options[name] or REFERENCE_BLOCK
    if q.dtype == np.float32:
        options["largest_score"] = LARGEST_FLOAT32
    return options


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
