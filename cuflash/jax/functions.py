"""A user's `score_mod` and `mask_mod`: their graphs, and what these read.

Functions with NumPy's names are recorded with symbols. Where that fails, the
function is traced by JAX, and its jaxpr read: it has JAX's functions, or reads
arrays from outside, which become operands of the call and have gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from cuflash.errors import ExpressionError, ValueRangeError
from cuflash.expressions import nodes, trace
from cuflash.expressions.nodes import Kind, Node
from cuflash.request import traced

from . import jaxprs
from .checks import check_array
from .jaxprs import Operands

_ROLES = "score_mod", "mask_mod"
_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "real"}


def take(
    options: dict[str, Any], arrays: dict[str, Any], wide: Any
) -> dict[str, Any]:
    """Replace the functions among a call's options by graphs.

    Parameters
    ----------
    options : dict
        Those that are no arrays: functions become nodes, and of `mod_arrays`
        numbers are left.
    arrays : dict
        Loses the arrays of `mod_arrays`.
    wide : dtype
        Of scores.

    Returns
    -------
    dict
        The arrays that graphs read, in the order of their slots.

    Raises
    ------
    CuflashError
    """
    functions = {x: options[x] for x in _ROLES if x in options}
    numbers = options.pop("mod_arrays", {})
    own = {x: arrays.pop(x) for x in [*arrays] if traced.is_named(x)}
    if not functions:
        if own or numbers:
            traced.recorded({"mod_arrays": numbers, **own})  # refuses them
        return {}
    for name, x in own.items():
        check_array(name, x)
        own[name] = _as_held(name, x)
    named = {traced.name_of(x): y for x, y in own.items()}
    operands = Operands(named)
    unread = {*named, *numbers}
    for role, function in functions.items():
        options[role], read = _graph(
            function, role, named, numbers, wide, operands
        )
        unread -= read
    traced.check_read(unread)
    if numbers:
        options["mod_arrays"] = traced.BySlot(numbers)
    found = {
        traced.named(name): x if x.ndim else x.reshape(1)
        for name, x in zip(operands.names, operands.arrays, strict=True)
    }
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    traced.given_of(_described(found), values)  # checks dtypes and counts
    return found


def take_whole(options: dict[str, Any], wide: Any) -> dict[str, Any]:
    """`take` of options with all of `mod_arrays`, which is parted first."""
    arrays: dict[str, Any] = {}
    if "mod_arrays" in options:
        options["mod_arrays"], arrays = traced.parted(options["mod_arrays"])
    return take(options, arrays, wide)


def wide_of(q: Any) -> np.dtype:
    """The dtype of scores."""
    is_double = getattr(q, "dtype", None) == np.float64
    return np.dtype("float64" if is_double else "float32")


def _as_held(name: str, array: Any) -> Any:
    """An array of NumPy's as JAX holds it: ints have 32 bits without x64."""
    if not isinstance(array, np.ndarray):
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    found = array.astype(dtype)
    if not np.array_equal(found, array):
        raise ValueRangeError(
            f"{name} has dtype {array.dtype} and numbers that {dtype} does not"
            " hold, to which JAX would cut it: call"
            ' jax.config.update("jax_enable_x64", True) first'
        )
    return found


def _described(arrays: Mapping[str, Any]) -> tuple[tuple, ...]:
    """Arrays as `traced.given_of` takes them; a number has one axis."""
    return tuple([
        (n, x.dtype, tuple(x.shape) or (1,), (0,) * max(x.ndim, 1))
        for n, x in arrays.items()
    ])  # fmt: skip


def _graph(
    function: Any,
    role: str,
    named: Mapping[str, Any],
    numbers: Mapping[str, Any],
    wide: Any,
    operands: Operands,
) -> tuple[Node, frozenset[str]]:
    """The graph of a function, and the names of `mod_arrays` in it."""
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    own = {traced.named(n): x for n, x in named.items()}
    given, _ = traced.given_of(_described(own), values)
    try:
        whole = {n for n, x in named.items() if not x.ndim}
        return trace.record(trace.with_numbers(function, whole), role, given)
    except ExpressionError as error:
        first = error
    if not callable(function) or hasattr(function, "shape"):
        raise first
    symbols = {
        name: nodes.make("number", _KINDS[type(x)], (), slot)
        for slot, (name, x) in enumerate(numbers.items())
    }
    given_names = frozenset((*named, *symbols))
    try:
        found = jaxprs.record(
            function, role, {**named, **symbols}, wide, operands
        )
    except ExpressionError:
        raise
    except jax.errors.TracerArrayConversionError as error:
        trace.refuse(
            "NumPy gets a traced value",
            "write jnp's function of this name; make an array that it is an"
            " index of JAX's, jnp.asarray(table), or pass it by mod_arrays",
            trace.place_of(error) or "",
        )
    except Exception as error:
        # Neither NumPy's functions nor JAX's: symbols know the line.
        raise first from error
    names = jaxprs.keywords_of(function)
    return (
        trace.result(found, role, function),
        given_names if names is None else given_names.intersection(names),
    )


def of_batch(asked: Mapping[str, Any]) -> bool:
    """Whether functions depend on the number of a sequence."""
    return any("b" in asked[x].depends for x in _ROLES if x in asked)


def scored(names: Iterable[str], asked: Mapping[str, Any]) -> set[str]:
    """The arrays of graphs that a score reads, among a call's."""
    own = [x for x in names if traced.is_named(x)]  # by slot
    roots = [asked[x] for x in _ROLES[:1] if x in asked]
    return {own[x.value[0]] for x in nodes.gathers(roots)}


def with_arrays(arrays: dict[str, Any], asked: dict[str, Any]) -> None:
    """Move what graphs read from a call's arrays to its options."""
    own = {x: arrays.pop(x) for x in [*arrays] if traced.is_named(x)}
    if any(x in asked for x in _ROLES):
        values = asked.get("mod_arrays", {})
        asked |= traced.of_slots(own, values, [*values.values()])
