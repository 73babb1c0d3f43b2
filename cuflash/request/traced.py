"""`score_mod`, `mask_mod` and `mod_arrays`: from what a user passes to graphs.

Arrays of `mod_arrays` travel among a call's arrays by the names of `named`,
and from the signature on by slots: ``mod_arrays[0]``, in the order of their
names. Numbers travel as values, which differ from call to call.
"""

from __future__ import annotations

import functools
import math
import numbers
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash.errors import (
    DTypeError,
    ExpressionError,
    UnsupportedError,
    ValueRangeError,
    in_words,
)
from cuflash.expressions import nodes, trace
from cuflash.expressions.nodes import Kind, Node
from cuflash.expressions.text import DTYPES, MOST_AXES
from cuflash.request import layouts
from cuflash.request.problem import Layout, Signature

# Of arrays, and of numbers, which kernels' arguments have room for.
MOST = 8

_MARK = "mod_arrays["


def named(name: str, argument: str = "mod_arrays") -> str:
    """What errors call an array of `mod_arrays`, or its tangent."""
    return f"{argument}[{name!r}]"


def is_named(name: str) -> bool:
    """Whether a call's argument is an array of `mod_arrays`."""
    return name.startswith(_MARK)


def name_of(argument: str) -> str:
    """The name in `mod_arrays` of an array, from that of `named`."""
    return argument[len(_MARK) + 1 : -2]


class BySlot(dict[str, Any]):
    """`mod_arrays` in the order of the slots of recorded graphs."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


_NUMBERS = frozenset((bool, int, float))
_NO_BITS = (0,) * MOST


def slot(index: int) -> str:
    """What the signature calls it."""
    return f"mod_arrays[{index}]"


def is_slot(name: str) -> bool:
    """Whether it is such a name, among those that signatures have."""
    return name.startswith(_MARK)


def parted(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers of `mod_arrays` by name, and its arrays by `named`."""
    if not isinstance(given, Mapping):
        raise DTypeError(
            f"mod_arrays is {in_words(given)}, expected a dict from the names"
            " of a function's keyword arguments to arrays and numbers"
        )
    values: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    in_order = given if isinstance(given, BySlot) else sorted(given, key=str)
    for name in in_order:
        value = given[name]
        if not isinstance(name, str) or not name.isidentifier():
            raise DTypeError(
                f"mod_arrays has the name {name!r}, expected that of a"
                " function's keyword argument"
            )
        if type(value) in _NUMBERS:
            values[name] = value
        elif isinstance(value, (numbers.Real, np.bool_)):
            values[name] = _as_number(value)
        elif hasattr(value, "shape"):
            arrays[named(name)] = value
        else:
            raise DTypeError(
                f"{named(name)} is {in_words(value)}, expected an array or a"
                " number"
            )
    return values, arrays


def _as_number(value: Any) -> bool | int | float:
    """Python's number for another one: NumPy's, a member of an IntEnum."""
    if isinstance(value, np.bool_):
        return bool(value)
    return int(value) if isinstance(value, numbers.Integral) else float(value)


class Recorded(NamedTuple):
    """What a call's functions are, apart from data.

    Attributes
    ----------
    fields : tuple of (str, object)
        Fields of a `Problem`.
    names : tuple of str
        Of the arrays, by slot, as `named` says.
    numbers : tuple
    """

    fields: tuple[tuple[str, Any], ...] = ()
    names: tuple[str, ...] = ()
    numbers: tuple[Any, ...] = ()


_ROLES = "score_mod", "mask_mod"


def recorded(options: Mapping[str, Any]) -> Recorded:
    """Record the functions among a call's options.

    In their place may be graphs that were recorded before, with the arrays
    and numbers of their slots.

    Raises
    ------
    ExpressionError, DTypeError, ValueRangeError, UnsupportedError
    """
    functions = [(x, options[x]) for x in _ROLES if x in options]
    values = options.get("mod_arrays", {})
    arrays = {x: y for x, y in options.items() if is_named(x)}
    wanted = [x for x in ("return_dmod", "return_d2mod") if options.get(x)]
    if not functions:
        if values or arrays or wanted:
            given_alone = "mod_arrays" if values or arrays else wanted[0]
            raise ValueRangeError(
                f"{given_alone} is given without score_mod and mask_mod,"
                " expected one of them: no other option reads it"
            )
        return Recorded()
    given, unread, values_of = _given(*_kinds_of(options))
    found: list[tuple[str, Any]] = []
    for role, function in functions:
        graph, read = function, unread
        if not isinstance(function, Node):
            graph, read = trace.recorded(function, role, given)
        found.append((role, graph))
        unread = unread - read
    check_read(unread)
    found += values_of
    for name in wanted:
        slots = _slots(name, options[name], given, "score_mod" in options)
        found.append(("return_dmod", slots))
    return Recorded(
        tuple(found),
        tuple(arrays),
        tuple([_checked(x, y) for x, y in values.items()]) if values else (),
    )


def taken(options: dict[str, Any]) -> Recorded:
    """Record the functions among a call's options, and take them out.

    The arrays that they read stay, by slot.
    """
    found = recorded(options)
    if found.fields:
        for name in (*_ROLES, "mod_arrays"):
            options.pop(name, None)
        for i, name in enumerate(found.names):
            options[slot(i)] = options.pop(name)
    return found


def place_of_read(options: Mapping[str, Any], role: str, gather: Node) -> str:
    """The user's file and line that read an array, and the array's name."""
    given = _given(*_kinds_of(options))[0]
    if isinstance(options[role], Node):
        return f"{role}: {named(given.arrays[gather.value[0]][0])}"
    place = trace.place_of_read(options[role], role, given, gather)
    return f"{place}: {named(given.arrays[gather.value[0]][0])}"


def _kinds_of(
    options: Mapping[str, Any],
) -> tuple[tuple[tuple, ...], tuple[tuple[str, type], ...]]:
    """The arguments of `_given`."""
    arrays = {x: y for x, y in options.items() if is_named(x)}
    values = options.get("mod_arrays", {})
    return (
        tuple([(n, x.dtype, x.shape, x.strides) for n, x in arrays.items()]),
        tuple([(name, type(x)) for name, x in values.items()]),
    )


def reads_only(
    mask: Node, options: Mapping[str, Any], names: Container[str]
) -> bool:
    """Whether all that a mask reads are arrays and numbers of these names."""
    given = _given(*_kinds_of(options))[0]
    for node in nodes.in_order([mask]):
        read: str | None = None
        if node.op in ("gather", "size"):
            read, _ = given.arrays[node.value[0]]
        elif node.op == "number":
            read, _ = given.numbers[node.value]
        if read is not None and read not in names:
            return False
    return True


def _checked(name: str, value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueRangeError(
            f"{named(name)} is {value}, expected an int of 64 bits"
        )
    return value


_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "real"}


def check_read(unread: Iterable[str]) -> None:
    """Raise ExpressionError for names that neither function has."""
    for name in sorted(unread):
        raise ExpressionError(
            f"mod_arrays has {name!r}, which neither function names:"
            f" add it to the keyword arguments, def f(..., *, {name})"
        )


def given_of(
    arrays: tuple[tuple, ...], values: tuple[tuple[str, type], ...]
) -> tuple[trace.Given, frozenset[str]]:
    """What functions are recorded with, and all names in it.

    `arrays` are (`named`, dtype, shape, strides) in the order of slots;
    `values` are (name, type).
    """
    return _given(arrays, values)[:2]


@functools.lru_cache(maxsize=4096)
def _given(
    arrays: tuple[tuple, ...], values: tuple[tuple[str, type], ...]
) -> tuple[trace.Given, frozenset[str], tuple[tuple[str, Any], ...]]:
    """What functions are recorded with, all names, and a problem's fields."""
    for what, count in ("arrays", len(arrays)), ("numbers", len(values)):
        if count > MOST:
            raise UnsupportedError(
                f"mod_arrays has {count} {what}, expected at most {MOST}:"
                " put several into one array"
            )
    kinds = []
    for name, dtype, shape, strides in arrays:
        known = np.dtype(dtype)
        if known.name not in DTYPES:
            raise DTypeError(
                f"{name} has dtype {known.name}, expected bool, integers or"
                " floating-point numbers of 16, 32 or 64 bits"
            )
        if len(shape) > MOST_AXES:
            raise UnsupportedError(
                f"{name} has {len(shape)} axes, expected at most {MOST_AXES}:"
                " flatten some, and compute the index"
            )
        if not shape:
            raise UnsupportedError(
                f"{name} has no axes: pass a number, x.item(), or x.reshape(1)"
            )
        if any(x >= 2**31 for x in shape):
            raise UnsupportedError(
                f"{name} has shape {shape}, expected axes below 2**31"
            )
        # The last axis alone: it is one in a copy, too.
        unit = (len(shape) - 1,) if strides[-1:] == (known.itemsize,) else ()
        kind = trace.ArrayKind(known.name, len(shape), unit)
        kinds.append((name_of(name), kind))
    given = trace.Given(
        tuple(kinds), tuple((name, _KINDS[x]) for name, x in values)
    )
    fields: list[tuple[str, Any]] = []
    if kinds:
        fields.append(("mod_arrays", tuple(x for _, x in kinds)))
    if values:
        fields.append(("mod_numbers", len(values)))
    names = frozenset(x for x, _ in (*given.arrays, *given.numbers))
    for name in nodes.LENGTHS:
        if name in names:
            raise ExpressionError(
                f"mod_arrays has {name!r}, expected another name: a function's"
                " argument of this one is the length of its sequence"
            )
    return given, names, tuple(fields)


def _slots(
    argument: str, wanted: Any, given: trace.Given, has_score: bool
) -> tuple[int, ...]:
    names = [name for name, _ in given.arrays]
    if isinstance(wanted, str) or not isinstance(wanted, (tuple, list)):
        raise DTypeError(
            f"{argument} is {in_words(wanted)}, expected a tuple of names of"
            " mod_arrays"
        )
    for name in wanted:
        if name not in names:
            known = ", ".join(names) or "no array"
            raise ValueRangeError(
                f"{argument} has {name!r}, expected names of arrays of"
                f" mod_arrays, which has {known}"
            )
        kind = dict(given.arrays)[name]
        if np.dtype(_as_numpy(kind.dtype)).kind != "f":
            raise DTypeError(
                f"{argument} has {name!r}, whose dtype is {kind.dtype}: only"
                " floating-point arrays have gradients"
            )
    if not has_score:
        raise ValueRangeError(
            f"{argument} is given without score_mod: a mask has no gradient"
        )
    return tuple(sorted({names.index(x) for x in wanted}))


def _as_numpy(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def by_slots(
    arrays: Mapping[str, Any], order: Iterable[str] | None = None
) -> dict[str, Any]:
    """Arrays by name, those of `mod_arrays` by slot, from those of `named`.

    Parameters
    ----------
    arrays : mapping
    order : iterable of str, optional
        A call's arrays, in the order of slots; by default these.
    """
    if not arrays:
        return {}
    names = tuple(arrays)
    slots = _in_slots(names, names if order is None else tuple(order))
    return dict(zip(slots, arrays.values(), strict=True))


@functools.lru_cache(maxsize=4096)
def _in_slots(
    names: tuple[str, ...], order: tuple[str, ...]
) -> tuple[str, ...]:
    slots = {x: slot(i) for i, x in enumerate(filter(is_slot, order))}
    return tuple(slots.get(x, x) for x in names)


def of_slots(
    arrays: Mapping[str, Any], names: Iterable[str], values: Sequence[Any]
) -> dict[str, Any]:
    """The option for arrays and numbers of recorded graphs.

    Parameters
    ----------
    arrays : mapping
        By the names of `named`, in the order of slots.
    names, values : iterable, sequence
        Of numbers.
    """
    found = BySlot({name_of(x): y for x, y in arrays.items()})
    found.update(zip(names, values, strict=True))
    return {"mod_arrays": found}


def in_slots(wanted: Sequence[str], arrays: Mapping[str, Any]) -> list[str]:
    """Names of arrays whose gradients are wanted, in the order of slots.

    Parameters
    ----------
    wanted : sequence of str
    arrays : mapping
        A call's arrays; those of `mod_arrays` by the names of `named`.
    """
    names = {*map(named, wanted)}
    return [name_of(x) for x in arrays if x in names]


def array_numbers(
    kinds: Sequence[trace.ArrayKind], taken: Mapping[str, Layout]
) -> dict[str, Any]:
    """The fields of `ExpressionNumbers`: sizes and strides of the arrays.

    Parameters
    ----------
    kinds : sequence of ArrayKind
        `Problem.mod_arrays`.
    taken : mapping of str to Layout
        The arrays as kernels read them.
    """
    sizes = np.ones((MOST, MOST_AXES), np.int64)
    strides = np.zeros((2, MOST, MOST_AXES), np.int64)
    strides[1, :, 0] = 1
    for i, kind in enumerate(kinds):
        layout, axes = taken[slot(i)], slice(kind.ndim)
        sizes[i, axes] = layout.shape
        strides[0, i, axes] = layouts.element_strides(layout)
        lengths = (*layout.shape[1:], 1)
        strides[1, i, axes] = np.cumprod(lengths[::-1])[::-1]
    return {
        "sizes": sizes.ravel(),
        "strides": strides[0].ravel(),
        "dmod_strides": strides[1].ravel(),
    }


def gradient_sizes(signature: Signature) -> dict[int, int]:
    """The elements of the gradients asked for, by slot."""
    return {
        i: math.prod(signature.options[slot(i)].shape)
        for i in signature.problem.return_dmod
    }


def bits(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers as the kernels' arguments hold them: 64 bits each."""
    if not values:
        return _NO_BITS
    found = [
        int.from_bytes(struct.pack("<d", x), "little")
        if isinstance(x, float) else int(x) % 2**64
        for x in values
    ]  # fmt: skip
    return *found, *[0] * (MOST - len(found))
