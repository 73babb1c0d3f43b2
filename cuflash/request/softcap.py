"""How 16-bit kernels compute softcap's tanh: by polynomials where it is small.

The error of a capped score is at most 8 * 2^-24 times the cap or, with a cap
above `LARGEST_FAST`, 27 * 2^-24 times the score.
"""

from __future__ import annotations

import math

# Where scores are not small, exp2 gives tanh with an absolute error of 8 *
# 2^-24. Up to this cap that is at most 2^-14 in a score, an eighth of
# float16's unit roundoff. With a larger cap, kernels call the library's tanh.
LARGEST_FAST = 128.0

# tanh_poly4: tanh(x) = x (1 + c1 x^2 + c2 x^4 + c3 x^6) for x^2 up to
# POLY4_MOST. These are the c for which the largest absolute error is smallest
# (Remez exchange; tests/unit/test_softcap.py): 1.3 * 2^-24. The first
# coefficient is exactly 1, so that the error is relative to x, at most 7.4 *
# 2^-24, and vanishes for small x: a large softcap changes nothing. The poles
# of tanh are at x^2 = -(pi / 2)^2, so one more term divides the error by
# about 4 * 2.47 / 0.2 = 50.
POLY4_MOST = 0.2
POLY4_COEFFICIENTS = (
    1.0,
    -0.33329662083994377,
    0.13235404148826932,
    -0.04596437588815598,
)

# tanh_poly3: one term fewer, for x^2 <= POLY3_MOST; absolute error 3.3 *
# 2^-24, relative to x 23 * 2^-24. With the rounding errors, which grow with x,
# the total is 4.2 * 2^-24. The tolerance of scores, and so of lse, is 8 *
# 2^-24 times the cap (tests/helpers/rounding.py). lse is what binds: weights
# are rounded to 16 bits.
POLY3_MOST = 0.08
POLY3_COEFFICIENTS = (1.0, -0.3331645565085092, 0.12714738581285098)

# On the tanh_poly3 path, a forward kernel's weights are relative to an earlier
# maximum of their row. A score times log2(e) is at most MOST; a weight,
# including dropout's factor, is at most 2^LARGEST_WEIGHT. float16 overflows at
# 2^16. With bfloat16, it is the float32 sums that could overflow.
MOST = {"float16": 12.0, "bfloat16": 48.0}
LARGEST_WEIGHT = {"float16": 15.0, "bfloat16": 60.0}

# Bounds on the exponents of scale and of scale / softcap. Within them, no
# value below is infinite in float32.
_SCALES, _RATIOS = 20, 16

# A term of a large softcap may be too small for a normal number; it becomes
# 0. In the score scale S (1 + ...), relatively, it is below 2^-126 S^6 /
# scale: 2^-28 with S up to LARGEST_PRODUCT and scale at least 2^-20.
_SMALLEST = 2.0**-126
_LARGEST_PRODUCT = 2.0**13


def is_large(softcap: float, dtype: str) -> bool:
    """The kernels' constant LARGE_SOFTCAP; float32 and float64 ignore it."""
    return softcap > LARGEST_FAST and dtype in MOST


def terms(
    scale: float, softcap: float
) -> tuple[list[float], list[float], float, float]:
    """The tanh_poly4 fields of `structs.OptionNumbers`.

    Returns
    -------
    terms : list of float
        t with softcap tanh(x) = S (t0 + t1 S^2 + t2 S^4 + t3 S^6),
        x = scale S / softcap.
    terms_log2 : list of float
        `terms` times log2(e).
    most : float
        The largest S^2 for which the polynomial is valid; -1, which no square
        is, if it never is: no softcap, a scale that is not positive (the
        largest q.k of a row would have the smallest score), a scale outside
        the bounds above, or a softcap far below it.
    inverse_log2 : float
        The factor that turns softcap tanh(x) log2(e) into tanh(x).
    """
    if not _served(scale, softcap):
        return [0.0] * 4, [0.0] * 4, -1.0, 0.0
    ratio = scale / softcap
    most = min(POLY4_MOST / ratio**2, _LARGEST_PRODUCT**2)
    return (
        _terms(scale, ratio, POLY4_COEFFICIENTS),
        _terms(scale * math.log2(math.e), ratio, POLY4_COEFFICIENTS),
        most,
        math.log(2) / softcap,
    )


def poly3_terms(
    scale: float, softcap: float, dtype: str, dropout: float
) -> tuple[list[float], float, float]:
    """The tanh_poly3 fields of `structs.OptionNumbers`.

    Returns
    -------
    terms_log2 : list of float
        As in `terms`, without the last.
    most : float
        The polynomial is valid where |S| is below it; 0 if it never is. The
        lower 16 bits of its float32 are 0.
    lowest : float
        The smallest row maximum, times log2(e), that weights may be relative
        to.
    """
    if not _served(scale, softcap) or dtype not in MOST:
        return [0.0] * 3, 0.0, 0.0
    ratio, scale_log2 = scale / softcap, scale * math.log2(math.e)
    in_range = math.sqrt(POLY3_MOST) / ratio, MOST[dtype] / scale_log2
    fraction, exponent = math.frexp(min(*in_range, _LARGEST_PRODUCT))
    most = math.ldexp(math.floor(fraction * 256), exponent - 8)
    largest = LARGEST_WEIGHT[dtype] + math.log2(1.0 - dropout)
    return (
        _terms(scale_log2, ratio, POLY3_COEFFICIENTS),
        most,
        scale_log2 * most - largest,
    )


def _terms(
    scale: float, ratio: float, coefficients: tuple[float, ...]
) -> list[float]:
    terms = (scale * ratio ** (2 * i) * c for i, c in enumerate(coefficients))
    return [x if abs(x) >= _SMALLEST else 0.0 for x in terms]


def _served(scale: float, softcap: float) -> bool:
    return (
        2.0**-_SCALES <= scale <= 2.0**_SCALES
        and 0 < scale <= 2.0**_RATIOS * softcap
    )
