"""Logits at the ends of the range, with exact scores.

k is a multiple of the identity, so a score is one product plus zeros: exact.
With scale 1, the row's maximum minus itself is then exactly 0, however large
it is, and the tolerances of rounding.py stay small at scores of 1e30.
"""

import numpy as np

# Largest |score|: 1e30, or in float16 the largest that its products reach.
LARGEST = {
    "float16": 2.0**29,
    "bfloat16": 2.0**100,
    "float32": 2.0**100,
    "float64": 2.0**400,  # its square is a number too
}


# An eighth of the smallest normal number.
SUBNORMAL = {
    "float16": 2.0**-17,
    "bfloat16": 2.0**-129,
    "float32": 2.0**-129,
    "float64": 2.0**-1025,
}


def from_scores(scores, rng, head_dim_v=16):
    """Return q, k, v, dout with the given scores (seqlen_q, seqlen_k).

    Up to the rounding of one element to the dtype. Call with scale=1.
    """
    seqlen_q, seqlen_k = scores.shape
    # Half of a large exponent goes to k, for dtypes with a small range.
    factor = 2.0**14 if np.abs(scores).max(initial=0) > 2.0**15 else 1.0
    q = (scores / factor)[None, :, None, :]
    k = (factor * np.eye(seqlen_k))[None, :, None, :]
    v = rng.standard_normal((1, seqlen_k, 1, head_dim_v))
    # k is up to 2^14: an ordinary dout would take dq past float16's range.
    dout = rng.standard_normal((1, seqlen_q, 1, head_dim_v)) / 16
    return q, k, v, dout


def powers_of_two(rng, shape, dtype):
    """Scores +-2^n, n uniform: scores are equal or far apart."""
    top = int(np.log2(LARGEST[dtype]))
    exponent = rng.integers(-min(top, 100), top + 1, shape)
    return rng.choice([-1.0, 1.0], shape) * 2.0**exponent


def distinct_powers_of_two(rng, shape, dtype):
    """The same without equal exponents in a row: one maximum."""
    top = int(np.log2(LARGEST[dtype]))
    exponents = np.arange(-min(top, 100), top + 1)
    rows, keys = shape
    exponent = rng.permuted(np.tile(exponents, (rows, 1)), axis=1)[:, :keys]
    return rng.choice([-1.0, 1.0], shape) * 2.0**exponent


def one_huge(rng, shape, dtype):
    """Ordinary scores, and in each row one that is huge.

    Not a power of two: times log2(e) it has to be rounded, twice alike.
    """
    scores = np.round(rng.standard_normal(shape) * 8) / 8
    rows, keys = shape
    huge = LARGEST[dtype] * rng.choice([0.625, 0.75, 0.875], rows)
    scores[np.arange(rows), rng.integers(0, keys, rows)] = huge
    return scores


def one_large(rng, shape, dtype):
    """Ordinary scores, and in each row one so much larger that exp of the
    difference is no float16, and still a float32.
    """
    scores = np.round(rng.standard_normal(shape) * 8) / 8
    rows, keys = shape
    large = rng.integers(20, 80, rows)
    scores[np.arange(rows), rng.integers(0, keys, rows)] = large
    return scores


def one_in_millions(rng, shape, dtype):
    """Ordinary scores, and in each row one of 10^6 to 10^7.

    Times log2(e) it is rounded to a multiple of 1/8 to 1, twice alike: by up
    to a factor of 2^(1/2) in the weights. From 2^24 on kernels do without.
    """
    scores = np.round(rng.standard_normal(shape) * 8) / 8
    rows, keys = shape
    large = 2.0**20 * rng.integers(8, 64, rows) / 8
    scores[np.arange(rows), rng.integers(0, keys, rows)] = large
    return scores


def one_hugely_negative(rng, shape, dtype):
    scores = one_huge(rng, shape, dtype)
    return np.where(scores > LARGEST[dtype] / 2, -scores, scores)


def all_huge(rng, shape, dtype):
    return np.full(shape, LARGEST[dtype])


def all_hugely_negative(rng, shape, dtype):
    return np.full(shape, -LARGEST[dtype])


def all_zero(rng, shape, dtype):
    return np.zeros(shape)


def near_float16_limit(rng, shape, dtype):
    """Scores at float16's limit: +-65504, +-65536."""
    return rng.choice([-65536.0, -65504.0, 65504.0, 65536.0], shape)


FAMILIES = (
    powers_of_two,
    one_huge,
    one_large,
    one_in_millions,
    one_hugely_negative,
    all_huge,
    all_hugely_negative,
    all_zero,
    near_float16_limit,
)

# A maximum that stands alone: else lse = m + log(2) = m where m is huge, and
# no gradient can be had from lse.
WITH_ONE_MAXIMUM = (
    distinct_powers_of_two,
    one_huge,
    one_large,
    one_hugely_negative,
)
