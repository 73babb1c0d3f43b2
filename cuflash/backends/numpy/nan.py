"""What NaN makes of results: where the inputs and masks alone tell.

0 * NaN is NaN, so each visible pair counts, whatever its weight:

- A NaN in q or k makes S NaN at the pairs that read it, and all weights of
  the row: out, lse, and all gradients to which the row adds are NaN.
- A NaN in v makes a column of out NaN, and of ddO.
- A NaN in out, dout or dlse makes D NaN and so the row of dS, or of T; one of
  out a column of ddO, too, and one of dout a column of dV.

So tiles compute with 0 in the place of NaN (`flagged`), and NaN is written
over their results, which takes a mask and no sum. Arrays are those of `tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.backends.numpy.arrays import LOGITS, Arrays
from cuflash.backends.numpy.flagged import Flagged
from cuflash.backends.numpy.seen import of_heads_alike
from cuflash.reference.scores import reduce_to_shape


def forward(
    flagged: Flagged, v: np.ndarray, results: Sequence[Arrays]
) -> None:
    """Write NaN into out and lse of each, the results and their tangents."""
    for x in results:
        for name in x.keys() & {"out", "lse", "max_score"}:
            x[name][flagged.lost] = np.nan
    _write_columns(flagged, v, [x["out"] for x in results])


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


def double_backward(flagged: Flagged, own: Arrays, gradients: Arrays) -> None:
    """Write NaN into the gradients, those of dout and dlse too."""
    of_dout = gradients["dout"]
    forward(flagged, own["v"], [{"out": of_dout, "lse": gradients["dlse"]}])
    np.copyto(of_dout, np.nan, where=np.isnan(own["out"]))
    backward(flagged, own, gradients)


def backward(flagged: Flagged, own: Arrays, gradients: Arrays) -> None:
    """Write NaN where rows of NaN in dS, or T, add to gradients."""
    if not flagged.nan.any():
        return
    dq, dk, dv = (gradients[x] for x in "qkv")
    logits = [gradients[x] for x in LOGITS if x in gradients]
    of_heads = [x for x in logits if x.ndim == 3]
    of_pairs = [x for x in logits if x.ndim != 3]
    nan = np.isnan(own["dout"])
    rows, lost = map(of_heads_alike, (flagged.nan, flagged.lost))
    sees = np.zeros(flagged.nan.shape, bool)
    of_k, of_v = np.zeros((2, *sees.shape[:3], dk.shape[-2]), bool)
    for tile, visible in flagged.tiles(slice(0, dk.shape[-2])):
        some = np.flatnonzero(rows[..., tile.queries].any(axis=(0, 1, 2)))
        if not some.size:
            continue
        at = tile.q_start + some
        seen = rows[..., at, None]
        if visible is not None:
            seen = seen & visible[..., some, :]
        sees[..., at] = seen.any(axis=-1)
        of_k |= seen.any(axis=-2)
        of_v |= (seen & lost[..., at, None]).any(axis=-2)
        if nan[..., at, :].any():
            weights = np.swapaxes(seen, -1, -2).astype(np.float32)
            columns = weights @ nan[..., at, :].astype(np.float32) > 0
            np.copyto(dv, np.nan, where=columns.any(axis=2, keepdims=True))
        for total in of_pairs:
            pairs = rows[..., tile.queries, None]
            if visible is not None:
                pairs = pairs & visible
            _write_sum(tile.of(total), pairs)
    dq[sees] = np.nan
    dk[of_k.any(axis=2, keepdims=True)] = np.nan
    dv[of_v.any(axis=2, keepdims=True)] = np.nan
    for total in of_heads:
        _write_sum(total, flagged.nan.any(axis=-1))


def _write_sum(total: np.ndarray, terms: Any) -> None:
    """Write NaN where a sum has one: of terms broadcast like the total."""
    shape = np.broadcast_shapes(total.shape, terms.shape)
    count = reduce_to_shape(np.broadcast_to(terms, shape), total.shape)
    np.copyto(total, np.nan, where=count > 0)
