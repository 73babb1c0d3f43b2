"""Which queries, keys and heads a call chooses: indices, slices, flags.

A call gets them as int32 indices, or as flags of queries. What the host knows
(slices, sequences of ints, NumPy arrays) is checked here; the values of an
array on a device are read with CUFLASH_CHECK=1 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ShapeError, in_words
from cuflash.request.validate.host_values import on_host as values_of
from cuflash.request.validate.readouts import indices as check_indices
from cuflash.request.validate.shapes import check_integers

# The axis of q, or of k, in full rank, that each chooses from.
_AXES = {"queries": ("q", 1), "keys": ("k", 1), "heads": ("q", 2)}


def split(
    choices: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that the host knows, and arrays that may be on a device."""
    on_host: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, x in choices.items():
        if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            raise DTypeError(
                f"{name} is {in_words(x)}, expected indices or a slice: of "
                f"one, pass [{x}]"
            )
        if x is not None:
            (on_host if is_on_host(x) else arrays)[name] = x
    return on_host, arrays


def is_on_host(x: Any) -> bool:
    """Whether the host knows what is chosen."""
    return isinstance(x, (slice, range, list, tuple, np.ndarray))


def check(arrays: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise ValueRangeError if an index is out of range; waits for a device.

    Parameters
    ----------
    arrays : mapping of str to array
        Of queries, keys and heads, those that may be on a device.
    inputs : mapping of str to array
        q and k, of any rank.
    """
    for name, x in arrays.items():
        if np.dtype(x.dtype).kind in "iu":
            check_indices(name, values_of(x), length_of(name, inputs))


def length_of(name: str, arrays: Mapping[str, Any]) -> int:
    """How many queries, keys or heads there are.

    0 of an array that is refused later. `arrays`: q and k, of any rank.
    """
    array, axis = _AXES[name]
    shape = tuple(arrays[array].shape)
    if len(shape) == 2:
        return (1, shape[0], 1)[axis]
    shape = shape if len(shape) == 4 else (1, *shape)
    length: int = shape[axis] if axis < len(shape) else 0
    return length


def host_indices(name: str, x: Any, length: int) -> np.ndarray:
    """Indices in range of what a slice, a sequence or an array chooses."""
    if isinstance(x, slice):
        return np.arange(length, dtype=np.int32)[_range(name, x, length)]
    return _checked(name, _array(name, x), length).astype(np.int32)


def host_queries(x: Any, length: int) -> np.ndarray:
    """As `host_indices`, for `weight_sums`: flags stay as they are."""
    if isinstance(x, slice) or (x := _array("queries", x)).dtype.kind != "b":
        return host_indices("queries", x, length)
    return x


def host_flags(x: Any, length: int) -> np.ndarray:
    """A flag for each query of what the host knows: (length,), or by batch."""
    if isinstance(x, slice):
        chosen = np.zeros(length, bool)
        chosen[_range("queries", x, length)] = True
        return chosen
    x = _array("queries", x)
    if x.dtype.kind == "b":
        check_flags(x, length)
        return x
    x = _checked("queries", x, length)
    if x.ndim not in (1, 2):
        raise ShapeError(
            f"queries has shape {x.shape}, expected (n,) or (batch, n)"
        )
    chosen = np.zeros((*x.shape[:-1], length), bool)
    np.put_along_axis(chosen, x, True, axis=-1)
    return chosen


def check_flags(x: Any, length: int) -> None:
    """Raise ShapeError if there is not a flag for each query."""
    if x.shape[-1:] != (length,):
        raise ShapeError(
            f"queries has shape {tuple(x.shape)}, expected flags of "
            f"{length} queries in its last axis"
        )


def _array(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ShapeError(f"{name} is no array of indices: {error}") from None


def _range(name: str, chosen: slice, length: int) -> slice:
    try:
        chosen.indices(length)
    except TypeError as error:
        raise DTypeError(f"{name} is {chosen}: {error}") from None
    return chosen


def _checked(name: str, x: np.ndarray, length: int) -> np.ndarray:
    """Indices in range, those from the end made positive."""
    if x.dtype.kind == "b":
        if x.shape != (length,):
            raise ShapeError(
                f"{name} has shape {x.shape}, expected indices, or "
                f"({length},) for a flag each"
            )
        return np.flatnonzero(x)
    if not x.size and x.dtype.kind == "f":  # an empty list
        x = x.astype(np.int32)
    check_integers(name, x.dtype)
    x = x.astype(np.int64)
    check_indices(name, x, length)
    return np.where(x < 0, x + length, x)
