"""Runs `weights`, `weight_sums`, `entropy` and their gradients by NumPy.

As `attention` does: tiles in the arrays' own precision (`readout_tiles`),
rows that are UNBOUNDED by the reference, in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cuflash.backends.numpy import expressions, reference
from cuflash.backends.numpy import readout_tiles as tiles
from cuflash.backends.numpy.arrays import (
    Arrays,
    dtype_of,
    heads_first,
    operands,
    options,
    working_dtype,
)
from cuflash.backends.numpy.parts import Part, parts
from cuflash.backends.numpy.picked import Picked, picked
from cuflash.backends.numpy.rows import Rows
from cuflash.backends.numpy.scores import Heads, of_heads, steps
from cuflash.reference.options import Tile
from cuflash.reference.scores import reduce_to_shape
from cuflash.request.problem import Call
from cuflash.request.readout import weights_shape

# Overflow and NaN are valid results, whatever the caller's np.errstate.
_quiet = np.errstate(all="ignore")

_INPUTS = "q", "k", "lse"


@_quiet
def readout(call: Call) -> np.ndarray:
    """Return weights, their sums, or entropies, in full rank."""
    found: np.ndarray = _READ[call.problem.direction](call)
    return found


@_quiet
def readout_backward(call: Call) -> tuple[np.ndarray, ...]:
    """Return dq, dk and dlse; drow_weights, as the user passed it; dmods."""
    p, arrays, of_call = call.problem, operands(call, *_INPUTS), options(call)
    assert p.readout is not None
    results = {
        "q": np.zeros(call.arrays["q"].shape, dtype_of(call)),
        "k": np.zeros(call.arrays["k"].shape, dtype_of(call)),
        "lse": np.zeros(call.arrays["lse"].shape, p.lse_dtype),
    }
    of_rows = np.zeros_like(results["lse"])
    written = {x: heads_first(x, y, p) for x, y in results.items()}
    written["row_weights"] = heads_first("row_weights", of_rows, p)
    add = _DIFFERENTIATE[p.direction](call)
    for part in parts(call, of_call, arrays):
        own = part.of(arrays)
        found = {x: np.zeros_like(own[x]) for x in _INPUTS}
        found["row_weights"] = np.zeros_like(own["lse"])
        add(part, own, found)
        for name, x in part.of(written).items():
            x[...] = found[name]
    gradients = list(results.values())
    if p.readout.return_drow_weights:
        shape = call.options["row_weights"].shape
        gradients.append(reduce_to_shape(of_rows, shape))
    of_arrays = expressions.gradients(call, of_call.get("score_mod"))
    return *gradients, *of_arrays


# Sums over queries ----------------------------------------------------------


def _weight_sums(call: Call) -> np.ndarray:
    p, arrays, of_call = call.problem, operands(call, *_INPUTS), options(call)
    assert p.readout is not None
    shape = p.batch, p.num_heads_q, p.seqlen_k
    found = np.zeros(shape)
    sums = {"sums": heads_first("sums", found, p)}
    for part in parts(call, of_call, arrays):
        own, total = part.of(arrays), part.of(sums)["sums"]
        rows = _row_numbers(call, part)
        if p.readout.reduce == "max":
            best = _maxima(part, own, rows, total.shape)
            total[...] = np.where(best.row < 0, 0, best.value)
            continue
        tiles.weight_sums(
            part.bounded(own), _of_tiles(rows, part), total, part.options
        )
        for some in part.rows():
            of_heads(total, some.heads)[...] += reference.weight_sums(
                some, own, *_of_rows(rows, some)
            )
    return found.astype(p.lse_dtype)


def _maxima(
    part: Part, own: Arrays, rows: tiles.RowNumbers, shape: tuple[int, ...]
) -> tiles.Maxima:
    """Of each key of a part, over the queries that count."""
    best = tiles.Maxima.none(shape)
    tiles.maxima(part.bounded(own), _of_tiles(rows, part), best, part.options)
    for some in part.rows():
        found = reference.maxima(some, own, *_of_rows(rows, some))
        best.add(some.heads, *found)
    return best


def _row_numbers(call: Call, part: Part) -> tiles.RowNumbers:
    """The row weights of a part's queries, and which of them count."""
    p = call.problem
    shape = p.batch, p.num_heads_q, p.seqlen_q
    factor = call.options.get("row_weights", np.ones((), p.lse_dtype))
    counts = call.options.get("chosen", np.ones((), bool))
    counts = counts[:, None] if counts.ndim == 2 else counts
    found = {
        name: heads_first("lse", np.broadcast_to(x, shape), p)
        for name, x in (("factor", factor), ("counts", counts))
    }
    return tiles.RowNumbers(**part.of(found))


def _of_tiles(rows: tiles.RowNumbers, part: Part) -> tiles.RowNumbers:
    """Without the rows that are the reference's."""
    if part.flagged is None:
        return rows
    return rows._replace(counts=rows.counts & ~part.flagged.rows)


def _of_rows(
    rows: tiles.RowNumbers, some: Rows
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of some rows."""
    found = some.of({"factor": rows.factor, "counts": rows.counts})
    return found["factor"], found["counts"]


def _entropy(call: Call) -> np.ndarray:
    p, arrays, of_call = call.problem, operands(call, *_INPUTS), options(call)
    found = np.zeros(call.arrays["lse"].shape, p.lse_dtype)
    written = {"entropy": heads_first("entropy", found, p)}
    for part in parts(call, of_call, arrays):
        own, result = part.of(arrays), part.of(written)
        tiles.entropy(part.bounded(own), result["entropy"], part.options)
        for some in part.rows():
            reference.entropy(some, own, result)
    return found


def _weights(call: Call) -> np.ndarray:
    p, arrays, of_call = call.problem, operands(call, *_INPUTS), options(call)
    assert p.readout is not None
    found = np.zeros(weights_shape(p), np.dtype(p.readout.dtype))
    for part in parts(call, of_call, arrays):
        own = part.of(arrays)
        bounded = part.bounded(own)
        for some in picked(call, part, own, found):
            visits = some.visits(bounded, part.options)
            tiles.weights(bounded, visits, some)
            rows = some.flagged(part, own)
            if rows is not None:
                every = slice(0, own["k"].shape[-2])
                some.put(rows.index, every, reference.weights(rows, own))
    return found


_READ = {
    "weights": _weights, "weight_sums": _weight_sums, "entropy": _entropy,
}  # fmt: skip


# Gradients ------------------------------------------------------------------

# Adds those of a part's arrays to zeros, by name.
_Adds = Callable[[Part, Arrays, Arrays], None]


def _of_weights(call: Call) -> _Adds:
    dweights = call.arrays["dweights"]

    def add(part: Part, own: Arrays, found: Arrays) -> None:
        bounded = part.bounded(own)
        every = np.broadcast_to(True, own["lse"].shape)
        rows = tiles.RowNumbers(np.ones_like(own["lse"]), every)
        of_tiles = _of_tiles(rows, part)
        chosen = list(picked(call, part, own, dweights))
        for some in chosen:
            visits = some.visits(bounded, part.options)
            factor = _gradient_of(some)
            tiles.gradients(bounded, visits, factor, of_tiles, found)
        _scale(call, found)
        for some in chosen:
            its = some.flagged(part, own)
            if its is not None:  # perhaps of some of the heads alone
                assert part.flagged is not None
                rows = rows._replace(counts=part.flagged.rows)
                _add_rows(its, own, rows, _gradient_of(some), found)

    return add


def _gradient_of(some: Picked) -> tiles.Factor:
    return lambda _, query, keys, log_p: some.gradient(query, keys)


def _of_weight_sums(call: Call) -> _Adds:
    p = call.problem
    assert p.readout is not None
    largest = p.readout.reduce == "max"
    sums = call.arrays["dsums"].astype(working_dtype(p), copy=False)
    dsums = {"sums": heads_first("sums", sums, p)}

    def add(part: Part, own: Arrays, found: Arrays) -> None:
        rows, of_keys = _row_numbers(call, part), part.of(dsums)["sums"]
        row = None
        if largest:
            row = _maxima(part, own, rows, of_keys.shape).row

        def factor(
            heads: Heads, query: np.ndarray, keys: slice, log_p: np.ndarray
        ) -> tuple[np.ndarray, tiles.Counts]:
            g = of_heads(of_keys, heads)[..., None, keys]
            if row is None:
                return g, None
            its = of_heads(row, heads)[..., None, keys]
            return g, its == query[:, None]

        _add(call, part, own, rows, factor, found)

    return add


def _of_entropy(call: Call) -> _Adds:
    p = call.problem
    of_call = call.arrays["dentropy"].astype(working_dtype(p), copy=False)
    dentropy = {"entropy": heads_first("entropy", of_call, p)}

    def add(part: Part, own: Arrays, found: Arrays) -> None:
        r = part.of(dentropy)["entropy"]
        rows = tiles.RowNumbers(r, np.broadcast_to(True, r.shape))
        _add(call, part, own, rows, _slope_of_entropy, found)

    return add


def _slope_of_entropy(
    heads: Heads, query: np.ndarray, keys: slice, log_p: np.ndarray
) -> tuple[np.ndarray, tiles.Counts]:
    return -1 - log_p, None


_DIFFERENTIATE: dict[str, Callable[[Call], _Adds]] = {
    "weights_backward": _of_weights,
    "weight_sums_backward": _of_weight_sums,
    "entropy_backward": _of_entropy,
}


def _add(
    call: Call,
    part: Part,
    own: Arrays,
    rows: tiles.RowNumbers,
    factor: tiles.Factor,
    found: Arrays,
) -> None:
    """Add the gradients of all queries of a part."""
    bounded = part.bounded(own)
    visits = steps(bounded["q"], bounded["k"], **part.options)
    tiles.gradients(bounded, visits, factor, _of_tiles(rows, part), found)
    _scale(call, found)
    for some in part.rows():
        _add_rows(some, own, rows, factor, found)


def _scale(call: Call, found: Arrays) -> None:
    for name in ("q", "k"):
        found[name] *= call.problem.scale


def _add_rows(
    some: Rows,
    own: Arrays,
    rows: tiles.RowNumbers,
    factor: tiles.Factor,
    found: Arrays,
) -> None:
    """Add the gradients of rows that are the reference's."""

    def of_tile(
        tile: Tile, log_p: np.ndarray
    ) -> tuple[np.ndarray, tiles.Counts]:
        query = some.index[tile.queries]
        return factor(some.heads, query, tile.keys, log_p)

    of_rows = _of_rows(rows, some)
    reference.readout_gradients(some, own, of_tile, *of_rows, found)
