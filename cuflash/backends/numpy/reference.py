"""Rows of NumPy calls by the reference, in float64.

For those that are flagged (`flagged`): the semantics of NaN and infinities.
Arrays are a part's, by name, of which `Rows` takes its own; options are the
rows' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.backends.numpy.arrays import KEYS, LOGITS, Arrays
from cuflash.backends.numpy.rows import Rows
from cuflash.reference import backward as backward_of
from cuflash.reference import double_backward as double_backward_of
from cuflash.reference import forward as forward_of
from cuflash.reference import jvp as jvp_of
from cuflash.reference import readouts as readouts_of

REFERENCE_BLOCK = 128  # rows of a tile
PAIRS = 128 * 128  # of a tile: its scores in float64 are 128 KiB
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def forward(
    rows: Rows,
    own: Arrays,
    directions: Sequence[Arrays],
    results: Sequence[Arrays],
) -> None:
    """Write the rows of out and lse, then of their tangents."""
    given = _arguments(rows, own)
    if not directions:
        out, lse = forward_of.query_outer(**given)
        rows.put(results[0], {"out": out, "lse": lse})
        if "max_score" in results[0]:
            del given["v"]
            largest = forward_of.max_score(**given)
            rows.put(results[0], {"max_score": largest})
    pairs = zip(directions, results[1:], strict=True)
    for number, (direction, result) in enumerate(pairs):
        moved = {f"{x}_dot": y for x, y in rows.of(direction).items()}
        found = jvp_of.jvp(
            **(given | moved | _dots(given, number, "mod_dots"))
        )
        rows.put(results[0], {"out": found.out, "lse": found.lse})
        rows.put(result, {"out": found.out_dot, "lse": found.lse_dot})


def backward(rows: Rows, own: Arrays, gradients: Arrays) -> None:
    """Write the rows of dq, and add to the other gradients."""
    given = _arguments(rows, own)
    names = (*"qkv", *(x for x in LOGITS if x in given))
    found = backward_of.key_outer(**given)
    rows.put(gradients, dict(zip(names, found, strict=False)))
    if given.get("return_dmod"):
        given["score_mod"].add(found[-1])


def double_backward(
    rows: Rows, direction: Arrays, own: Arrays, gradients: Arrays
) -> None:
    """Write the rows of d2q, ddout and ddlse; add to the other gradients."""
    given = _arguments(rows, own)
    given |= dict.fromkeys(("ddq", "ddk", "ddv"))
    given |= {f"dd{x}": y for x, y in rows.of(direction).items()}
    given |= _dots(given, 0, "ddmods")
    found = double_backward_of.double_backward(**given)._asdict()
    if d2mod := found.pop("d2mod"):
        given["score_mod"].add(d2mod)
    by_name = {  # d2q, ..., ddout, ...
        x.removeprefix("d2" if x.startswith("d2") else "d"): y
        for x, y in found.items()
        if y is not None
    }
    rows.put(gradients, by_name)


def _dots(given: Arrays, number: int, name: str) -> dict[str, Any]:
    """The tangents of score_mod's arrays in a direction, if there are any."""
    function: Any = given.get("score_mod")
    return {} if function is None else {name: function.dots(number)}


def weights(rows: Rows, own: Arrays) -> np.ndarray:
    """Return the weights of the rows."""
    given = _arguments(rows, own)
    for name in ("block_q", "block_k"):
        del given[name]
    return readouts_of.weights(**given)


def weight_sums(
    rows: Rows, own: Arrays, row_weights: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Return the rows' sums."""
    given = _arguments(rows, own)
    return readouts_of.weight_sums(
        **given, row_weights=row_weights, chosen=counts
    )


def maxima(
    rows: Rows, own: Arrays, row_weights: np.ndarray, counts: np.ndarray
) -> readouts_of.Maxima:
    """Return the rows' maxima, with the rows' indices in their part."""
    given = _arguments(rows, own)
    value, row = readouts_of.maxima(
        **given, row_weights=row_weights, chosen=counts
    )
    return readouts_of.Maxima(value, np.where(row < 0, -1, rows.index[row]))


def entropy(rows: Rows, own: Arrays, results: Arrays) -> None:
    """Write the rows' entropies."""
    found = readouts_of.entropy(**_arguments(rows, own))
    rows.put(results, {"entropy": found})


def readout_gradients(
    rows: Rows,
    own: Arrays,
    factor: readouts_of.Factor,
    row_factor: np.ndarray,
    counts: np.ndarray,
    gradients: Arrays,
) -> None:
    """Add the rows' gradients of a readout to all."""
    found = readouts_of.gradients(
        **_arguments(rows, own),
        factor=factor,
        row_factor=row_factor,
        chosen=counts,
    )
    *of_rows, dmod = found
    by_name = zip(("q", "k", "lse", "row_weights"), of_rows, strict=True)
    rows.add(gradients, dict(by_name))
    if dmod:
        rows.options["score_mod"].add(dmod)


def _arguments(rows: Rows, own: Arrays) -> dict[str, Any]:
    """The reference's arrays and options for some rows."""
    arrays = rows.of(own)
    q, few = arrays["q"], min(len(rows.index), REFERENCE_BLOCK)
    for name in arrays.keys() & KEYS:
        arrays[name] = _for_groups(arrays[name], q)
    blocks = {"block_q": REFERENCE_BLOCK, "block_k": PAIRS // few}
    options = rows.options | blocks
    if q.dtype == np.float32:
        options["largest_score"] = LARGEST_FLOAT32
        if "lse" in arrays:
            lse = arrays["lse"].astype(np.float64)
            arrays["lse"] = _unrounded(lse, q, arrays["k"], options)
    return options | arrays


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
