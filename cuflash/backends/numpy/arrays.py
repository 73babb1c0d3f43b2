"""A call's arrays by name, with heads first.

Heads become leading axes, (batch, num_heads_kv, group_size, seqlen, d); k and
v have a group of 1, so that the query heads of a group share them without a
copy. Tangents and gradients have the name and the axes of what they belong
to. An option's array has the three axes of heads, then its axes of tokens, as
the table of options tells.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.backends.numpy.expressions import Recorded
from cuflash.reference.dropout import Dropout
from cuflash.reference.expressions import HeadIndices
from cuflash.request.options import TABLE
from cuflash.request.problem import Call, Problem
from cuflash.request.traced import is_slot

Arrays = dict[str, np.ndarray]

KEYS = ("k", "v")  # of a group's heads
# All others that are no option's have queries.
OF_KEYS = (*KEYS, "sums")
OPTIONS = {x.name: x.array for x in TABLE if x.array and x.array.axes}
# Logits, which have gradients: the argument that asks for each.
LOGITS = {x.needs[0]: x.name for x in TABLE if x.of_gradients and x.needs}
_SCALARS = tuple(x for x in TABLE if x.check and x.part_of)


def operands(call: Call, *names: str) -> Arrays:
    """Return the inputs, or some, in the dtype to compute with."""
    p, dtype = call.problem, working_dtype(call.problem)
    found = {}
    for name in names or call.arrays:
        x = heads_first(name, call.arrays[name], p)
        found[name] = for_blas(x.astype(dtype, copy=False))
    return found


def directions(call: Call) -> list[Arrays]:
    """Return each direction's tangents, of the inputs that move."""
    p = call.problem
    if p.tangents is None:
        return []
    found: list[Arrays] = [{} for _ in range(p.tangents.count)]
    for number, moved in enumerate(found):
        for name, several in call.directions.items():
            if is_slot(name):  # `Recorded.dots`
                continue
            x = heads_first(name, several[number], p)
            x = x.astype(working_dtype(p), copy=False)
            moved[name] = x if name in OPTIONS else for_blas(x)
    return found


def options(call: Call) -> dict[str, Any]:
    """Return a call's keyword arguments for tiles and the reference."""
    p = call.problem
    found = scalars(p) | {"block_q": p.block_q, "block_k": p.block_k}
    for name, array in call.options.items():
        rule = OPTIONS.get(name)
        if rule is not None:
            x = heads_first(name, array, p)
            real = "lse" in rule.dtypes
            found[name] = x.astype(working_dtype(p), copy=False) if real else x
    if p.dropout:
        found["dropout"] = Dropout(p.dropout, call.seed, *_head_indices(p))
    if not (p.score_mod is p.mask_mod is None):
        found |= Recorded(call).options(_head_indices(p))
    return found


def _head_indices(problem: Problem) -> HeadIndices:
    batch = np.arange(problem.batch)[:, None, None]
    groups = (1, problem.num_heads_kv, problem.group_size)
    return HeadIndices(batch, np.arange(problem.num_heads_q).reshape(groups))


def scalars(problem: Problem) -> dict[str, Any]:
    """Return the options that are numbers, as far as they are present."""
    found = {"scale": problem.scale, "causal": problem.causal}
    for row in _SCALARS:
        value = getattr(problem, row.name)
        if value != row.nothing:
            found[row.name] = value
    return found


def zeros_of_logits(options: dict[str, Any]) -> Arrays:
    """Return sums for the gradients of those that are given.

    All rows of a head add to one number of it, which is float64.
    """
    given = {name: options[name] for name in LOGITS if name in options}
    return {
        name: np.zeros(x.shape, np.float64 if x.ndim == 3 else x.dtype)
        for name, x in given.items()
    }


def heads_first(name: str, array: np.ndarray, problem: Problem) -> np.ndarray:
    """View an array in full rank with the axes of heads first."""
    if name in KEYS:
        return array.swapaxes(1, 2)[:, :, None]
    groups = problem.num_heads_kv, problem.group_size
    rule = OPTIONS.get(name)
    if rule is not None:
        shape = (1,) * (len(rule.axes) - array.ndim) + array.shape
        sizes = dict(zip(rule.axes, shape, strict=True))
        batch = sizes.pop("batch", 1)
        if sizes.pop("num_heads_q", 1) == 1:
            groups = 1, 1
        return array.reshape(batch, *groups, *sizes.values())
    if array.ndim == 3:  # lse, sums
        return array.reshape(len(array), *groups, array.shape[-1])
    batch, seqlen_q, _, d = array.shape
    return array.reshape(batch, seqlen_q, *groups, d).transpose(0, 2, 3, 1, 4)


def for_blas(x: np.ndarray) -> np.ndarray:
    """Rows that BLAS reads in place, so that strides change no bit."""
    row, element = x.strides[-2:]
    in_place = element == x.itemsize and row >= x.shape[-1] * element
    return x if in_place and row % element == 0 else x.copy(order="C")


def working_dtype(problem: Problem) -> np.dtype:
    """float64 for float64, else float32: that of lse."""
    return np.dtype(problem.lse_dtype)


def dtype_of(call: Call) -> np.dtype:
    """The inputs' dtype, in native bytes."""
    return next(iter(call.arrays.values())).dtype.newbyteorder("=")
