"""Tangents of `mod_arrays`, and cotangents of their gradients.

They travel as the arrays do (traced.py): by the names of `traced.named` among
a call's arguments, by slots from the signature on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ValueRangeError, in_words
from cuflash.expressions.text import MOST_AXES
from cuflash.request import layouts
from cuflash.request.problem import Layout
from cuflash.request.traced import MOST, is_slot, name_of, named, slot


def slots_of(names: Iterable[str]) -> tuple[int, ...]:
    """The indices of the arrays among what moves, in order."""
    known = {slot(i): i for i in range(MOST)}
    return tuple(known[x] for x in names if is_slot(x))


def parted_tangents(given: Any, argument: str) -> dict[str, Any]:
    """Tangents of `mod_arrays` by `named`; `argument` is what they are."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DTypeError(
            f"{argument} is {in_words(given)}, expected a dict from names of"
            " arrays of mod_arrays to their tangents"
        )
    found = {named(str(x), argument): y for x, y in given.items()}
    for name, value in found.items():
        if not hasattr(value, "shape"):
            raise DTypeError(f"{name} is {in_words(value)}, expected an array")
    return found


def moved(
    tangents: dict[str, Any],
    argument: str,
    arrays: Sequence[str],
    has_score: bool,
) -> dict[str, str]:
    """Name those of `parted_tangents` by slots; return what they were.

    Parameters
    ----------
    tangents : dict
        Changed in place; it may have others.
    argument : str
    arrays : sequence of str
        `Recorded.names`.
    has_score : bool
        Whether there is a score_mod.
    """
    slots = {
        named(name_of(x), argument): slot(i) for i, x in enumerate(arrays)
    }
    own = [x for x in tangents if x.startswith(f"{argument}[")]
    if own and not has_score:
        raise ValueRangeError(
            f"{argument} is given without score_mod: nothing else moves with"
            " arrays of mod_arrays"
        )
    for name in own:
        if name not in slots:
            known = ", ".join(arrays) or "there is none"
            raise ValueRangeError(
                f"{name} is given, expected the tangent of an array of"
                f" mod_arrays: {known}"
            )
    for name in own:
        tangents[slots[name]] = tangents.pop(name)
    return {slots[x]: x for x in own}


def gradients_of(
    read: Sequence[str], argument: str = "return_dmod"
) -> tuple[str, tuple[str, ...]]:
    """The argument that asks for the gradients of arrays, and its value.

    Parameters
    ----------
    read : sequence of str
        By the names of `named`.
    argument : str
    """
    return argument, tuple(map(name_of, read))


def with_gradients(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The arrays of `gradients_of` among arguments, by their names there."""
    return tuple(map(named, asked.get("return_dmod", ())))


def tangents_named(
    tangents: Mapping[str, Any], names: Mapping[str, str], argument: str
) -> dict[str, Any]:
    """Tangents as errors name them, from what they move.

    Parameters
    ----------
    tangents : mapping
        By what they move: `names`, or arrays by the names of `named`.
    names : mapping of str to str
    argument : str
        What tangents of arrays are.
    """
    return {
        named(name_of(x), argument) if is_slot(x) else names[x]: y
        for x, y in tangents.items()
    }


def joined_tangents(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the tangents of arrays out of arguments, as arguments."""
    found: dict[str, dict[str, Any]] = {}
    for name in [*arrays]:
        argument, mark, inner = name.partition("['")
        if mark and not is_slot(name):
            found.setdefault(argument, {})[inner[:-2]] = arrays.pop(name)
    return found


_REALS = "float16", "bfloat16", "float32", "float64"


def check_moves(name: str, what: str, dtype: str) -> None:
    """Raise DTypeError for the tangent of an array that cannot move."""
    if is_slot(what) and dtype not in _REALS:
        raise DTypeError(
            f"{name} is given for an array of dtype {dtype}: only"
            " floating-point arrays move"
        )


def name_of_moved(what: str, name: str) -> str:
    """What errors call an input whose tangent has a name."""
    if not is_slot(what):
        return what
    return f"mod_arrays{name[name.index('[') :]}"


def tangent_numbers(taken: Mapping[str, Layout]) -> dict[str, Any]:
    """The fields of `ModTangentNumbers`.

    Parameters
    ----------
    taken : mapping of str to Layout
        All tangents as kernels read them, after an axis of directions.
    """
    strides = np.zeros((MOST, MOST_AXES), np.int64)
    directions = np.zeros(MOST, np.int64)
    for i in range(MOST):
        layout = taken.get(f"{slot(i)}_dot")
        if layout is not None:
            first, *others = layouts.element_strides(layout)
            directions[i] = first
            strides[i, : len(others)] = others
    return {"strides": strides.ravel(), "directions": directions}
