"""erf and erfc of NumPy arrays: NumPy has neither.

Both are computed in float64, by polynomials whose coefficients are those of
expansions in Chebyshev polynomials, found with 60 digits. With u = 2^-53:

- `_NEAR`: erf(y) / y in y^2, for 0 <= y <= 1. The expansion ends 1.3e-19 from
  it, where it is 0.84 and more. Horner's sum has condition 1.96 at y = 1 and
  less below, and is multiplied once: 4 u in all.
- `_TAIL`: (3 + y) exp(y^2) erfc(y) in (3 - y) / (3 + y), for 1/2 <= y <= 28,
  where it is 0.56 and more. The expansion ends 1.2e-18 of it away up to 27.5;
  above, erfc is 0. The quotient, the sum, two powers of e and four products
  and quotients round: 13 u of erfc in the worst case, if they all err alike.

erfc below 1/2 is 1 - erf, erf above 1 is 1 - erfc: a difference from 1 of at
most 0.53 and 0.16 has no larger error than 6 u and 4 u. Tests measure all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_NEAR = (
    1.1283791670955126, -0.3761263890318375, 0.11283791670954882,
    -0.026866170645077334, 0.005223977624823223, -0.0008548326981129666,
    0.00012055331122299266, -1.4925595519506043e-05, 1.6461004480962034e-06,
    -1.6350354461959655e-07, 1.4660051998394848e-08, -1.1373902296430911e-09,
    5.958930743134941e-11,
)  # fmt: skip
_TAIL = (
    1.0740069070883398, 0.8833944531698836, 0.5902283571041019,
    0.31046726190056223, 0.11952776128728669, 0.026827234624690586,
    -0.001212416627099037, -0.003034062005001593, -0.0005483096939746179,
    0.00027677788272797304, 0.0001075615145640049, -3.0398365915104917e-05,
    -1.747077594496592e-05, 4.7499010298136855e-06, 2.766338288188907e-06,
    -1.0001989569211733e-06, -4.105666285067514e-07, 2.3471371317289661e-07,
    5.0332225141054596e-08, -5.0410344750063335e-08, -4.92016778209629e-09,
    7.048470725889871e-09, 7.242995217647731e-10,
)  # fmt: skip
_LARGEST = 28.0  # erfc of it is less than any float64
# Elements that are computed at once: what they need stays in a core's cache.
_AT_ONCE = 2**14


def erf(x: Any) -> Any:
    """2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    return _by_parts(x, _erf)


def erfc(x: Any) -> Any:
    """1 - erf(x), of which no digits cancel where it is small."""
    return _by_parts(x, _erfc)


def _by_parts(
    x: Any, function: Callable[[np.ndarray, np.ndarray], None]
) -> Any:
    """A function of each element, in the dtype of a real."""
    x = np.asarray(x)
    out = np.empty(x.shape, x.dtype if x.dtype.kind == "f" else np.float64)
    given, found = x.reshape(-1), out.reshape(-1)
    with np.errstate(all="ignore"):
        for first in range(0, x.size, _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            result = np.empty(given[part].size)
            function(given[part].astype(np.float64), result)
            found[part] = result
    return out[()]


def _erf(x: np.ndarray, out: np.ndarray) -> None:
    y = np.abs(x)
    is_near = y < 1
    near, far = x[is_near], y[~is_near]
    out[is_near] = _odd(near)
    out[~is_near] = 1 - _complement(far)
    np.copysign(out, x, out=out)


def _erfc(x: np.ndarray, out: np.ndarray) -> None:
    y = np.abs(x)
    is_near = y < 0.5
    near, far = x[is_near], y[~is_near]
    out[is_near] = 1 - _odd(near)
    found = _complement(far)
    out[~is_near] = np.where(x[~is_near] < 0, 2 - found, found)


def _odd(x: np.ndarray) -> np.ndarray:
    """erf of numbers from -1 to 1."""
    return x * _polynomial(_NEAR, x * x)


def _complement(y: np.ndarray) -> np.ndarray:
    """erfc of numbers from 1/2 up, and of NaN.

    y^2 is n^2 - (n - y) (n + y), with n to 10 bits behind the point: n^2 is
    exact, and the rest less than 0.03.
    """
    y = np.minimum(y, _LARGEST)
    n = np.rint(y * 1024) / 1024
    power = np.exp(-n * n) * np.exp((n - y) * (n + y))
    above = 3 + y
    return power * _polynomial(_TAIL, (3 - y) / above) / above


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """By Horner's rule."""
    result = np.full(x.shape, coefficients[-1])
    for c in coefficients[-2::-1]:
        result *= x
        result += c
    return result
