"""What NaN makes of results: where the inputs and masks alone tell.

0 * NaN is NaN, so each visible pair counts, whatever its weight:

- A NaN in q or k makes S NaN at the pairs that read it, and all weights of
  the row: out, lse, and all gradients to which the row adds are NaN.
- A NaN in v makes a column of out NaN, and of ddO.
- A NaN in out, dout or dlse makes D NaN and so the row of dS, or of T; one of
  out a column of ddO, too, and one of dout a column of dV.

So tiles compute with 0 in the place of NaN (`numpy_flagged`), and NaN is
written over their results, which takes a mask and no sum. Arrays are those of
`numpy_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.backends.numpy.flagged import Flagged
from cuflash.backends.numpy.seen import of_heads_alike
from cuflash.backends.numpy.tangents import SecondGradients
from cuflash.reference.scores import reduce_to_shape


def forward(
    flagged: Flagged,
    v: np.ndarray,
    of_out: Sequence[np.ndarray],
    of_lse: Sequence[np.ndarray],
) -> None:
    """Write NaN into out, lse and their tangents."""
    for x in (*of_out, *of_lse):
        x[flagged.lost] = np.nan
    _write_columns(flagged, v, of_out)


def _write_columns(
    flagged: Flagged, v: np.ndarray, of_out: Sequence[np.ndarray]
) -> None:
    """Write NaN into columns of out where rows see one in v."""
    places = np.flatnonzero(flagged.values.any(axis=(0, 1, 2)))
    if not places.size:
        return
    values = None
    first, end = int(places[0]), int(places[-1]) + 1
    for tile, visible in flagged.tiles(slice(first, end)):
        if visible is not None:
            visible = visible[..., places - first]
            if not visible.any():
                continue
        if flagged.lost[..., tile.queries].all():
            continue
        if values is None:
            values = np.isnan(v[..., places, :]).astype(np.float32)
        if visible is None:
            columns = values.any(axis=-2, keepdims=True)
        else:
            columns = visible.astype(np.float32) @ values > 0
        for x in of_out:
            np.copyto(x[..., tile.queries, :], np.nan, where=columns)


def backward(
    flagged: Flagged, dout: np.ndarray, gradients: Sequence[np.ndarray]
) -> None:
    """Write NaN into the gradients.

    gradients : dq, dk, dv, and those of a bias and of a sink.
    """
    dq, dk, dv, *others = gradients
    names = [x for x in ("bias", "sink") if x in flagged.options]
    given = dict(zip(names, others, strict=True))
    dbias, dsink = given.get("bias"), given.get("sink")
    _spread(flagged, dout, dq, dk, dv, dbias, dsink)


def double_backward(
    flagged: Flagged,
    dout: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    gradients: SecondGradients,
) -> None:
    """Write NaN into the gradients."""
    d2q, d2k, d2v, ddout, d2bias, d2sink, ddlse = gradients
    forward(flagged, v, [ddout], [ddlse])
    np.copyto(ddout, np.nan, where=np.isnan(out))
    _spread(flagged, dout, d2q, d2k, d2v, d2bias, d2sink)


def _spread(
    flagged: Flagged,
    dout: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    dbias: np.ndarray | None,
    dsink: np.ndarray | None,
) -> None:
    """Write NaN where rows of NaN in dS, or T, add to gradients."""
    if not flagged.nan.any():
        return
    nan = np.isnan(dout)
    rows, lost = map(of_heads_alike, (flagged.nan, flagged.lost))
    sees = np.zeros(flagged.nan.shape, bool)
    of_k, of_v = np.zeros((2, *sees.shape[:3], dk.shape[-2]), bool)
    for tile, visible in flagged.tiles(slice(0, dk.shape[-2])):
        own = np.flatnonzero(rows[..., tile.queries].any(axis=(0, 1, 2)))
        if not own.size:
            continue
        at = tile.q_start + own
        seen = rows[..., at, None]
        if visible is not None:
            seen = seen & visible[..., own, :]
        sees[..., at] = seen.any(axis=-1)
        of_k |= seen.any(axis=-2)
        of_v |= (seen & lost[..., at, None]).any(axis=-2)
        if nan[..., at, :].any():
            weights = np.swapaxes(seen, -1, -2).astype(np.float32)
            columns = weights @ nan[..., at, :].astype(np.float32) > 0
            np.copyto(dv, np.nan, where=columns.any(axis=2, keepdims=True))
        if dbias is not None:
            pairs = rows[..., tile.queries, None]
            if visible is not None:
                pairs = pairs & visible
            _write_sum(tile.of(dbias), pairs)
    dq[sees] = np.nan
    dk[of_k.any(axis=2, keepdims=True)] = np.nan
    dv[of_v.any(axis=2, keepdims=True)] = np.nan
    if dsink is not None:
        _write_sum(dsink, flagged.nan.any(axis=-1))


def _write_sum(total: np.ndarray, terms: Any) -> None:
    """Write NaN where a sum has one: of terms broadcast like the total."""
    shape = np.broadcast_shapes(total.shape, terms.shape)
    count = reduce_to_shape(np.broadcast_to(terms, shape), total.shape)
    np.copyto(total, np.nan, where=count > 0)
