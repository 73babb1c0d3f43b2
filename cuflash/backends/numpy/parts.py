"""What a call on NumPy arrays is made of: arrays by heads, parts, options.

Heads become leading axes, (batch, num_heads_kv, group_size, seqlen, d); k and
v have a group of 1, so that the query heads of a group share them without a
copy. A part is a packed sequence, or the whole call. Where batch
elements differ in their `Kind`, each is a part of its own. Of UNBOUNDED ones
some rows are flagged (`numpy_flagged`), which makes the others BOUNDED.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends.numpy.flagged import (
    Flagged,
    Values,
    bounded_options,
    find,
)
from cuflash.backends.numpy.kinds import LARGEST_VALUE, Kind
from cuflash.backends.numpy.rows import Rows, cut
from cuflash.backends.numpy.scores import Heads, of_heads, options_of
from cuflash.backends.numpy.tangents import Direction
from cuflash.reference.dropout import Dropout
from cuflash.reference.packed import spans
from cuflash.request.problem import Call, Problem

_ALL = slice(None)


class Part(NamedTuple):
    """A range of queries and keys that is computed at once, with options."""

    queries: slice
    keys: slice
    options: dict[str, Any]
    heads: Heads = (_ALL, _ALL, _ALL)
    kind: int = Kind.BOUNDED
    flagged: Flagged | None = None

    @property
    def of_queries(self) -> tuple[slice, ...]:
        """The index of its queries."""
        return (*self.heads, self.queries)

    @property
    def of_keys(self) -> tuple[slice, ...]:
        """The index of its keys."""
        return (*self.heads, self.keys)

    def rows(self) -> Iterator[Rows]:
        """Return its flagged rows."""
        return iter(()) if self.flagged is None else cut(self.flagged)

    def direction_of(self, direction: Direction) -> Direction:
        """Return the tangents of its heads, queries and keys."""
        q, k, v, bias, sink = direction
        return Direction(
            None if q is None else q[self.of_queries],
            None if k is None else k[self.of_keys],
            None if v is None else v[self.of_keys],
            of_heads(bias, self.heads),
            of_heads(sink, self.heads),
        )

    def bounded_rows(self, x: np.ndarray, instead: float = 0) -> np.ndarray:
        """Return its own of q, or of lse, another number if flagged."""
        own = x[self.of_queries]
        if self.flagged is None:
            return own
        return self.flagged.rows_of(own, instead)

    def bounded_keys(self, x: np.ndarray) -> np.ndarray:
        """Return its own of k, with 0 in flagged keys."""
        own = x[self.of_keys]
        return own if self.flagged is None else self.flagged.keys_of(own)

    def bounded_direction(self, direction: Direction) -> Direction:
        """Return `direction_of` with 0 for what is flagged."""
        own = self.direction_of(direction)
        return own if self.flagged is None else self.flagged.direction_of(own)


def parts(
    call: Call,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    of_queries: Sequence[np.ndarray] = (),
    lse: np.ndarray | None = None,
    *,
    directions: Sequence[Direction] = (),
    largest: float = LARGEST_VALUE,
) -> Iterator[Part]:
    """Cut a call into parts of one `Kind` each.

    Beside v, `of_queries` and `directions` hold values, which are BOUNDED up
    to `largest`.
    """
    scale = call.problem.scale
    for part in _sequences(call):
        moved = [part.direction_of(x) for x in directions]
        at, keys = part.of_queries, part.of_keys
        values = Values(
            *(q[at], k[keys], v[keys]),
            [x[at] for x in of_queries],
            moved,
            None if lse is None else lse[at],
            largest,
        )
        found = values.kinds(scale, part.options)
        if (found == Kind.UNBOUNDED).any():
            flagged, found = find(values, scale, part.options)
            options = bounded_options(values, part.options)
            part = part._replace(options=options, flagged=flagged)
        if len({*found.tolist()}) <= 1:
            yield part._replace(kind=max(found, default=Kind.SMALL))
            continue
        for number, kind in enumerate(found):
            heads = (slice(number, number + 1), _ALL, _ALL)
            own = options_of(part.options, heads)
            one = part._replace(heads=heads, options=own, kind=kind)
            if part.flagged is not None:
                one = one._replace(flagged=part.flagged.of(heads))
            yield one


def _sequences(call: Call) -> Iterator[Part]:
    """The whole call, or each of its packed sequences."""
    p, options = call.problem, _options(call)
    if p.num_sequences is None:
        yield Part(_ALL, _ALL, options)
        return
    for number, queries, keys in spans(
        call.options["cu_seqlens_q"],
        call.options["cu_seqlens_k"],
        p.seqlen_q,
        p.seqlen_k,
        p.max_seqlen_q,
        p.max_seqlen_k,
    ):
        own = dict(options)
        if "dropout" in own:
            own["dropout"] = own["dropout"]._replace(batch=number)
        slopes = call.options.get("alibi_slopes")
        if slopes is not None and np.ndim(slopes) == 2:
            own["alibi_slopes"] = own["alibi_slopes"][number, None]
        yield Part(queries, keys, own)


def _options(call: Call) -> dict[str, Any]:
    """The options that are present, in the form the reference expects."""
    p, given = call.problem, call.options
    options: dict[str, Any] = {"causal": p.causal, "window": p.window}
    if p.softcap:
        options["softcap"] = p.softcap
    for name in ("alibi_slopes", "sink"):
        if name in given:
            heads = np.atleast_2d(given[name]).astype(working_dtype(p))
            groups = (len(heads), p.num_heads_kv, p.group_size)
            options[name] = heads.reshape(groups)
    for name in ("bias", "mask"):
        if name in given:
            own = by_group(given[name], p)
            dtype = own.dtype if name == "mask" else working_dtype(p)
            options[name] = own.astype(dtype, copy=False)
    for name in ("segment_ids_q", "segment_ids_k"):
        if name in given:
            ids = np.atleast_2d(given[name])
            options[name] = ids[:, None, None]
    if p.dropout:
        batch = np.arange(p.batch)[:, None, None]
        groups = (1, p.num_heads_kv, p.group_size)
        head = np.arange(p.num_heads_q).reshape(groups)
        options["dropout"] = Dropout(p.dropout, call.seed, batch, head)
    return options


def by_group(array: np.ndarray, problem: Problem) -> np.ndarray:
    """Split axis 1, heads, into (key head, head in group); 1 stays 1."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    groups = (problem.num_heads_kv, problem.group_size)
    if array.shape[1] == 1:
        groups = (1, 1)
    return array.reshape(array.shape[0], *groups, *array.shape[2:])


def zero_gradients(call: Call) -> dict[str, np.ndarray]:
    """Sums of the gradients of bias and sink, of those that are given."""
    p, given = call.problem, call.options
    sums = {}
    if "bias" in given:
        shape = by_group(given["bias"], p).shape
        sums["bias"] = np.zeros(shape, working_dtype(p))
    if "sink" in given:
        sums["sink"] = np.zeros((1, p.num_heads_kv, p.group_size))
    return sums


def working_dtype(problem: Problem) -> np.dtype:
    """float64 for float64, else float32: that of lse."""
    return np.dtype(problem.lse_dtype)


def by_query_heads(array: np.ndarray, problem: Problem) -> np.ndarray:
    """View (batch, seqlen_q, heads, d) with the heads first."""
    batch, seqlen_q, _, d = array.shape
    groups = (problem.num_heads_kv, problem.group_size)
    return array.reshape(batch, seqlen_q, *groups, d).transpose(0, 2, 3, 1, 4)


def by_key_heads(array: np.ndarray) -> np.ndarray:
    """View (batch, seqlen_k, heads, d) with the heads first."""
    return array.swapaxes(1, 2)[:, :, None]


def operands(call: Call, *names: str) -> list[np.ndarray]:
    """Arrays of a call with heads first, in the dtype to compute with."""
    p, found = call.problem, []
    for name in names:
        array = call.arrays[name]
        if name in ("k", "v"):
            by_head = by_key_heads(array)
        else:
            by_head = by_query_heads(array, p)
        by_head = by_head.astype(working_dtype(p), copy=False)
        found.append(for_blas(by_head))
    return found


def for_blas(x: np.ndarray) -> np.ndarray:
    """Rows that BLAS reads in place, so that strides change no bit."""
    row, element = x.strides[-2:]
    in_place = element == x.itemsize and row >= x.shape[-1] * element
    return x if in_place and row % element == 0 else x.copy(order="C")


def part_options(call: Call, part: Part) -> dict[str, Any]:
    """The keyword arguments of a part, for its tiles."""
    p = call.problem
    blocks = {"block_q": p.block_q, "block_k": p.block_k}
    return {"scale": p.scale, **blocks, **part.options}


def like(array: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """A gradient with the shape and the dtype of its array."""
    dtype = array.dtype.newbyteorder("=")
    gradient = np.broadcast_to(gradient, np.shape(gradient) or array.shape)
    return gradient.reshape(array.shape).astype(dtype, order="C")


def dtype_of(call: Call) -> np.dtype:
    """The inputs' dtype, in native bytes."""
    return next(iter(call.arrays.values())).dtype.newbyteorder("=")
