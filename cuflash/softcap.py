"""Polynomials for softcap's tanh at small scores, for 16-bit kernels."""

from __future__ import annotations

import math

# tanh_poly4: tanh(x) = x (c0 + c1 x^2 + c2 x^4 + c3 x^6) for x^2 up to
# POLY4_MOST, with an absolute error of at most 2^-24.2. This is the minimax
# polynomial (Remez exchange; tests/unit/test_softcap.py). The poles of tanh
# are at x^2 = -(pi / 2)^2, so one more term divides the error by 4 * 2.47 /
# 0.2 = 50: three terms give 2^-18.6, five give 2^-30, which is below the
# rounding error.
POLY4_MOST = 0.2
POLY4_COEFFICIENTS = (
    0.9999989997227811,
    -0.33326541949608074,
    0.13208071684384,
    -0.045245803302449476,
)

# tanh_poly3: one term fewer, for x^2 <= POLY3_MOST; absolute error 2^-23. With
# the rounding errors, which grow with x, the total is 2.9 * 2^-24. The
# tolerance of scores, and so of lse, is 8 * 2^-24 times the cap
# (tests/helpers/rounding.py). lse is what binds: weights are rounded to 16
# bits.
POLY3_MOST = 0.08
POLY3_COEFFICIENTS = (
    0.9999971746459902,
    -0.33304803142236757,
    0.12608940748055775,
)

# On the tanh_poly3 path, a forward kernel's weights are relative to an earlier
# maximum of their row. A score times log2(e) is at most MOST; a weight,
# including dropout's factor, is at most 2^LARGEST_WEIGHT. float16 overflows at
# 2^16. With bfloat16, it is the float32 sums that could overflow.
MOST = {"float16": 12.0, "bfloat16": 48.0}
LARGEST_WEIGHT = {"float16": 15.0, "bfloat16": 60.0}

# Bounds on the exponents of scale and of scale / softcap. Within them, no
# value below is denormal or infinite in float32: the last term,
# scale (scale / softcap)^6 c3, is at least 2^-121.
_SCALES, _RATIOS = 20, 16


def terms(
    scale: float, softcap: float
) -> tuple[list[float], list[float], float, float]:
    """The tanh_poly4 fields of `abi.OptionNumbers`.

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
        largest q.k of a row would have the smallest score), or a scale or
        softcap outside the bounds above.
    inverse_log2 : float
        The factor that turns softcap tanh(x) log2(e) into tanh(x).
    """
    if not _served(scale, softcap):
        return [0.0] * 4, [0.0] * 4, -1.0, 0.0
    ratio = scale / softcap
    t = [
        scale * ratio ** (2 * i) * c for i, c in enumerate(POLY4_COEFFICIENTS)
    ]
    return (
        t,
        [x * math.log2(math.e) for x in t],
        POLY4_MOST / ratio**2,
        math.log(2) / softcap,
    )


def poly3_terms(
    scale: float, softcap: float, dtype: str, dropout: float
) -> tuple[list[float], float, float]:
    """The tanh_poly3 fields of `abi.OptionNumbers`.

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
    terms_log2 = [
        scale_log2 * ratio ** (2 * i) * c
        for i, c in enumerate(POLY3_COEFFICIENTS)
    ]
    fraction, exponent = math.frexp(
        min(math.sqrt(POLY3_MOST) / ratio, MOST[dtype] / scale_log2)
    )
    most = math.ldexp(math.floor(fraction * 256), exponent - 8)
    largest = LARGEST_WEIGHT[dtype] + math.log2(1.0 - dropout)
    return terms_log2, most, scale_log2 * most - largest


def _served(scale: float, softcap: float) -> bool:
    ratio = scale / softcap if softcap else 0.0
    return (
        2.0**-_SCALES <= scale <= 2.0**_SCALES
        and 2.0**-_RATIOS <= ratio <= 2.0**_RATIOS
    )
