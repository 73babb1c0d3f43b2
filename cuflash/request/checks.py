"""Checks of scalar options: numbers, flags, windows."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ValueRangeError, in_words

# Within these bounds, dividing a float32 score by softcap and multiplying by
# it again neither overflows nor underflows.
SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-30, 1e30


def window(name: str, given: Any) -> tuple[int | None, int | None]:
    """A window's bounds, (None, None) without one."""
    if given is None:
        return (None, None)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        advice = ""
        if isinstance(given, numbers.Integral):
            advice = f": pass ({given}, 0) for keys before the query"
        raise DTypeError(
            f"{name} is {in_words(given)}, expected (left, right), each an "
            f"int, or None for no bound{advice}"
        )
    for bound in given:
        if bound is None:
            continue
        if not _is_integer(bound):
            raise DTypeError(
                f"{name} has a bound {in_words(bound)}, expected an int, or "
                "None for no bound"
            )
        if bound < 0:
            raise ValueRangeError(
                f"{name} is {tuple(given)}, expected bounds of at least 0, "
                "or None for no bound: a query sees left keys before its own "
                "position, the key at it, and right keys after it"
            )
    left, right = (None if x is None else int(x) for x in given)
    return left, right


def softcap(name: str, given: Any) -> float:
    """A softcap, 0 without one."""
    value = 0.0 if given is None else real(name, given)
    if value and not SMALLEST_SOFTCAP <= value <= LARGEST_SOFTCAP:
        raise ValueRangeError(
            f"{name} is {given}, expected {SMALLEST_SOFTCAP} to "
            f"{LARGEST_SOFTCAP}, or 0 or None for none: scores stay between "
            "-softcap and softcap"
        )
    return value


def dropout(name: str, given: Any) -> float:
    """A probability below 1, 0 without dropout."""
    value = 0.0 if given is None else real(name, given)
    if not 0.0 <= value < 1.0:
        raise ValueRangeError(
            f"{name} is {given}, expected at least 0 and less than 1: it "
            "is the probability that a pair is dropped"
        )
    return value


def real(name: str, x: Any, cure: str | None = None, why: str = "") -> float:
    """A finite real number; `cure` and `why` end the errors."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        cure = _item(name, x) if cure is None else cure
        raise DTypeError(
            f"{name} is {in_words(x)}, expected a real number{cure}"
        )
    try:
        value = float(x)
    except OverflowError:  # an int beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise ValueRangeError(f"{name} is {x}, expected a finite number{why}")
    return value


def whole(
    name: str,
    x: Any,
    low: int,
    high: int | None,
    cure: str | None = None,
    why: str = "",
) -> int:
    """An int from low to high; `cure` and `why` end the errors."""
    if type(x) is not int and not _is_integer(x):
        cure = _item(name, x) if cure is None else cure
        raise DTypeError(f"{name} is {in_words(x)}, expected an int{cure}")
    value = int(x)
    if value < low or high is not None and value > high:
        known = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueRangeError(f"{name} is {value}, expected {known}{why}")
    return value


def _is_integer(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def check_partner(name: str, needed: str, given: Any, why: str) -> None:
    """Raise ValueRangeError unless what `name` needs is given too."""
    if needed not in given:
        raise ValueRangeError(
            f"{name} is given without {needed}, expected {needed} too: {why}"
        )


def flag(name: str, given: Any) -> bool:
    """Check an argument that is True or False."""
    if given is True or given is False:
        return given
    if not isinstance(given, (bool, np.bool_)):
        raise DTypeError(
            f"{name} is {in_words(given)}, expected True or False"
            f"{_item(name, given)}"
        )
    return bool(given)


def length(name: str, given: Any) -> int:
    """A number of tokens."""
    return whole(name, given, 0, 2**31 - 1)


def seed(name: str, given: Any) -> int:
    """A seed of dropout."""
    if hasattr(given, "integers"):  # a generator of NumPy
        raise DTypeError(
            f"{name} is {in_words(given)}, expected an int: pass "
            f"int({name}.integers(2**63))"
        )
    return whole(name, given, 0, 2**64 - 1)


def _item(name: str, x: Any) -> str:
    """What to pass in place of an array of one number."""
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple) or math.prod(shape) != 1:
        return ""
    return f" (pass {name}.item())" if hasattr(x, "item") else ""
