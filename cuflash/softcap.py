"""softcap's tanh, where scores are small: a polynomial for 16-bit kernels."""

from __future__ import annotations

import math

# tanh(x) = x (c0 + c1 x^2 + c2 x^4 + c3 x^6) for x^2 <= SMALL, absolutely
# right to 2^-24.2: of all such polynomials the one whose largest error is
# smallest (by Remez's exchange; tests/unit/test_softcap.py). tanh has its
# poles at x^2 = -(pi / 2)^2, and another term is worth a factor of 4 * 2.47 /
# 0.2 = 50: with three the error is 2^-18.6, with five 2^-30, below what
# rounding takes.
SMALL = 0.2
COEFFICIENTS = (
    0.9999989997227811,
    -0.33326541949608074,
    0.13208071684384,
    -0.045245803302449476,
)

# The same with a term less, for x^2 <= SLIGHT: right to 2^-23. With what is
# rounded besides, which grows with x, that comes to 2.9 times 2^-24. Scores,
# and so lse, may be off by 8 of those of the cap (tests/helpers/rounding.py).
# That binds: weights are rounded to 16 bits.
SLIGHT = 0.08
SLIGHT_COEFFICIENTS = (
    0.9999971746459902,
    -0.33304803142236757,
    0.12608940748055775,
)

# Where scores are slight, a forward kernel's weights are relative to a maximum
# that their row had before. By log2(e), a score is at most MOST; and a weight,
# with dropout's factor, at most 2^LARGEST_WEIGHT. float16 has numbers up to
# 2^16. Of bfloat16, sums in float32 are what might overflow.
MOST = {"float16": 12.0, "bfloat16": 48.0}
LARGEST_WEIGHT = {"float16": 15.0, "bfloat16": 60.0}

# Exponents of two within which nothing below is denormal or infinite in
# float32: the last term is scale (scale / softcap)^6 c3, 2^-121 or more.
_SCALES, _RATIOS = 20, 16


def terms(
    scale: float, softcap: float
) -> tuple[list[float], list[float], float, float]:
    """What a kernel takes of a call: see `abi.OptionNumbers`.

    Returns
    -------
    terms : list of float
        t with softcap tanh(x) = S (t0 + t1 S^2 + t2 S^4 + t3 S^6),
        x = scale S / softcap.
    terms_log2 : list of float
        Those times log2(e).
    small : float
        The largest S^2 for which they serve. -1, which no square is, where
        they do not: without a softcap, with a scale that is not positive (a
        row's largest product would have its smallest score), or numbers
        beyond all use.
    inverse_log2 : float
        What makes tanh(x) of softcap tanh(x) log2(e).
    """
    if not _served(scale, softcap):
        return [0.0] * 4, [0.0] * 4, -1.0, 0.0
    ratio = scale / softcap
    t = [scale * ratio ** (2 * i) * c for i, c in enumerate(COEFFICIENTS)]
    return (
        t,
        [x * math.log2(math.e) for x in t],
        SMALL / ratio**2,
        math.log(2) / softcap,
    )


def slight_terms(
    scale: float, softcap: float, dtype: str, dropout: float
) -> tuple[list[float], float, float]:
    """What it takes for slight scores.

    Returns
    -------
    terms_log2 : list of float
        As above.
    slight : float
        They serve where |S| is below that, of which the lower half of a
        float32's bits is 0; 0 where they do not.
    lowest : float
        The least maximum, by log2(e), that their weights may be relative to.
    """
    if not _served(scale, softcap) or dtype not in MOST:
        return [0.0] * 3, 0.0, 0.0
    ratio, scale_log2 = scale / softcap, scale * math.log2(math.e)
    terms_log2 = [
        scale_log2 * ratio ** (2 * i) * c
        for i, c in enumerate(SLIGHT_COEFFICIENTS)
    ]
    fraction, exponent = math.frexp(
        min(math.sqrt(SLIGHT) / ratio, MOST[dtype] / scale_log2)
    )
    slight = math.ldexp(math.floor(fraction * 256), exponent - 8)
    largest = LARGEST_WEIGHT[dtype] + math.log2(1.0 - dropout)
    return terms_log2, slight, scale_log2 * slight - largest


def _served(scale: float, softcap: float) -> bool:
    ratio = scale / softcap if softcap else 0.0
    return (
        2.0**-_SCALES <= scale <= 2.0**_SCALES
        and 2.0**-_RATIOS <= ratio <= 2.0**_RATIOS
    )
