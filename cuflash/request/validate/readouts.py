"""The arguments of `weights`, `weight_sums`, `entropy`, and their gradients'.

q, k, lse and the options are checked as those of `backward`; this module
checks what is chosen, row weights, and cotangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from cuflash.errors import DTypeError, ShapeError, ValueRangeError, in_words
from cuflash.request import checks
from cuflash.request.layouts import broadcasts
from cuflash.request.problem import Call, Layout, Problem, Signature
from cuflash.request.readout import (
    COTANGENTS,
    READOUT_ARRAYS,
    Readout,
    weights_shape,
)
from cuflash.request.validate.attention import signature_of, split_options
from cuflash.request.validate.descriptions import (
    describe,
    layout_of,
    remembered,
)
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.host_values import first
from cuflash.request.validate.scalars import scalars_of
from cuflash.request.validate.shapes import axes_in_words, check_integers

REDUCTIONS = ("sum", "max")

# The arguments of `readout` that are neither arrays nor options.
_ASKED = (
    "scale", "causal", "block_q", "block_k", "precision", "deterministic",
    "dtype", "reduce", "return_drow_weights",
)  # fmt: skip

# Arrays that have not the axes and the dtype of q, k or lse.
_APART = "dweights", "row_weights"

# The length of the axis that each array of indices chooses from, for messages.
_CHOSEN_FROM = {
    "queries": "seqlen_q", "keys": "seqlen_k", "heads": "num_heads_q",
}  # fmt: skip


def readout(
    direction: str,
    given: Mapping[str, Any],
    chosen: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    scale: Any = None,
    causal: Any = False,
    block_q: Any = None,
    block_k: Any = None,
    precision: Any = None,
    deterministic: Any = False,
    dtype: Any = None,
    reduce: Any = "sum",
    return_drow_weights: Any = False,
) -> Call:
    """Check the arguments of a readout or of its gradients.

    Parameters
    ----------
    direction : str
        One of `readout.READOUTS` or of `readout.READOUT_GRADIENTS`.
    given : mapping of str to array
        q, k, lse, row_weights, and the cotangent of gradients.
    chosen : mapping of str to array
        The other `READOUT_ARRAYS`.
    options : mapping of str to object
        Those of the table that the user passed.
    """
    asked = split_options(dict(options))
    own = {x: y for x, y in given.items() if x not in _APART}
    others = {x: given[x] for x in _APART if x in given}
    signature = _signature(
        direction,
        describe(own),
        describe({**others, **chosen}),
        scalars_of(scale, causal, block_q, block_k, precision),
        *asked[:2],
        deterministic=checks.flag("deterministic", deterministic),
        dtype=None if dtype is None else _name_of(dtype),
        reduce=_reduction(reduce),
        return_drow_weights=_wants_rows(return_drow_weights, given),
    )
    if "dweights" in others:
        own["dweights"] = others.pop("dweights")
    return Call(
        signature, own, None, {**asked.arrays, **others, **chosen},
        mod_numbers=asked.numbers,
    )  # fmt: skip


@functools.cache
def by_name(direction: str) -> Callable[..., Call]:
    """`readout` for a direction, with a name for each argument."""

    def check(**arguments: Any) -> Call:
        def taken(names: Iterable[str]) -> dict[str, Any]:
            return {x: arguments.pop(x) for x in names if x in arguments}

        given = taken(("q", "k", "lse", "row_weights", *COTANGENTS.values()))
        chosen, asked = taken(READOUT_ARRAYS), taken(_ASKED)
        return readout(direction, given, chosen, arguments, **asked)

    check.__name__ = direction
    return check


def _name_of(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise DTypeError(
            f"dtype is {in_words(dtype)}, expected a dtype, or None for that "
            "of lse"
        ) from None


def _reduction(reduce: Any) -> Literal["sum", "max"]:
    if reduce not in REDUCTIONS:
        raise ValueRangeError(
            f"reduce is {in_words(reduce)}, expected "
            f"{' or '.join(map(repr, REDUCTIONS))}"
        )
    return reduce


def _wants_rows(flag: Any, given: Mapping[str, Any]) -> bool:
    wanted = checks.flag("return_drow_weights", flag)
    if wanted:
        checks.check_partner(
            "return_drow_weights", "row_weights", given,
            "it has no effect alone",
        )  # fmt: skip
    return wanted


@remembered
def _signature(
    direction: str,
    seen: tuple[tuple, ...],
    seen_others: tuple[tuple, ...],
    *call: Any,
    deterministic: bool,
    dtype: str | None,
    reduce: Literal["sum", "max"],
    return_drow_weights: bool,
) -> Signature:
    """Check a call; nothing here depends on the data."""
    signature = signature_of(
        direction, seen, *call, deterministic=deterministic
    )
    check_one_device(seen[:1] + seen_others)
    p = signature.problem
    others = {x[0]: x for x in seen_others}
    cotangent = others.pop("dweights", None)
    layouts = {name: _layout(x, p, signature.rank)
               for name, x in others.items()}  # fmt: skip
    readout = Readout(
        _dtype_of(p, dtype),
        **{x: layouts[x].shape[-1] for x in _CHOSEN_FROM if x in layouts},
        by_batch=_by_batch(p, layouts),
        chosen="chosen" in layouts,
        row_weights="row_weights" in layouts,
        reduce=reduce,
        return_drow_weights=return_drow_weights,
    )
    given = dict(signature.layouts)
    if cotangent is not None:
        given["dweights"] = of_weights = _of_weights(
            cotangent, replace(p, readout=readout), signature.rank
        )
        readout = replace(readout, dtype=of_weights.dtype.name)
    # Weights are those before dropout.
    problem = replace(p, dropout=0.0, readout=readout)
    options = {**signature.options, **layouts}
    return replace(signature, problem=problem, layouts=given, options=options)


def _dtype_of(p: Problem, dtype: str | None) -> Any:
    if dtype is None:
        return p.lse_dtype
    known = dict.fromkeys((p.lse_dtype, p.dtype))
    if dtype not in known:
        raise DTypeError(
            f"dtype is {dtype}, expected {' or '.join(known)}, that of lse or "
            "of q"
        )
    return dtype


def _by_batch(p: Problem, layouts: Mapping[str, Layout]) -> bool:
    """Whether batch elements have queries of their own."""
    found = [layouts[x] for x in ("queries", "chosen") if x in layouts]
    return any(len(x.shape) == 2 and x.strides[0] for x in found)


def _layout(seen: tuple, p: Problem, rank: int) -> Layout:
    """The layout of an array of `READOUT_ARRAYS`.

    queries and chosen are (batch, n), with stride 0 along batch if all batch
    elements share them; keys and heads (n,); row_weights (batch,
    num_heads_q, seqlen_q).
    """
    name, shape, _, dtype, *_ = seen
    shape = tuple(shape)
    if name == "row_weights":
        return _of_rows(seen, p, rank)
    if name == "chosen":
        if np.dtype(dtype).kind != "b":
            raise DTypeError(f"queries has dtype {dtype}, expected bool")
        return layout_of(seen, (*_batch_of(shape, p), p.seqlen_q))
    if np.dtype(dtype).kind == "b":  # on a device: who knows how many are set
        raise DTypeError(
            f"{name} has dtype bool, expected integers: pass "
            f"{name}.nonzero()[0]"
        )
    check_integers(name, dtype)
    if name != "queries":
        if len(shape) != 1:
            raise ShapeError(
                f"{name} has {axes_in_words(len(shape))}, expected 1: indices "
                f"below {_CHOSEN_FROM[name]} ({name} {shape})"
            )
        return layout_of(seen)
    return layout_of(seen, (*_batch_of(shape, p), shape[-1]))


def _batch_of(shape: tuple[int, ...], p: Problem) -> tuple[int]:
    """The axis of batch that queries have: their own, or one for all."""
    if len(shape) not in (1, 2) or shape[:-1] not in ((), (1,), (p.batch,)):
        raise ShapeError(
            f"queries has shape {shape}, expected (n,), or ({p.batch}, n) for "
            "each batch element its own"
        )
    return (p.batch,)


def _of_rows(seen: tuple, p: Problem, rank: int) -> Layout:
    name, shape, _, dtype, *_ = seen
    got, full = np.dtype(dtype).name, (p.batch, p.num_heads_q, p.seqlen_q)
    if got != p.lse_dtype:
        raise DTypeError(
            f"{name} has dtype {got}, expected {p.lse_dtype} as lse: they "
            "multiply rows of weights"
        )
    own = full[4 - rank :]
    if not broadcasts(tuple(shape), own):
        raise ShapeError(
            f"{name} has shape {tuple(shape)}, expected one that broadcasts "
            f"to {own} as lse has"
        )
    return layout_of(seen, full)


def _of_weights(seen: tuple, p: Problem, rank: int) -> Layout:
    """The layout of dweights in full rank."""
    name, shape, strides, dtype, offset, _ = seen
    shape, strides = tuple(shape), tuple(strides)
    full = weights_shape(p)
    own = full[4 - rank :]
    got, known = np.dtype(dtype).name, dict.fromkeys((p.lse_dtype, p.dtype))
    if got not in known:
        raise DTypeError(
            f"{name} has dtype {got}, expected {' or '.join(known)}, as "
            "weights have"
        )
    if shape != own:
        raise ShapeError(
            f"{name} has shape {shape}, expected {own} as weights returns it "
            "(layout is (batch, heads, queries, keys))"
        )
    missing = 4 - len(shape)
    return Layout(full, (0,) * missing + strides, dtype, offset)


def indices(name: str, values: np.ndarray, length: int) -> None:
    """Raise ValueRangeError if an index is out of range.

    Negative indices count from the end.
    """
    at = first((values < -length) | (values >= length))
    if at is not None:
        place = ", ".join(map(str, at))
        words = f"{-length} to {length - 1}" if length else "none at all"
        raise ValueRangeError(
            f"{name}[{place}] is {values[at]}, expected {words}: "
            f"{_CHOSEN_FROM[name]} is {length}"
        )
