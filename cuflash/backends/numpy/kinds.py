"""Which inputs `tiles` computes, and which are the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from cuflash.backends.numpy.arrays import LOGITS

LARGEST_SCORE = 2.0**14  # above it float32 has 9 bits behind the point
LARGEST_VALUE = 2.0**40  # sums of products of three stay below 2^128
# Of a double backward: W is below 2^40, dP below 2^49, and their product with
# q or k, summed over 2^20 rows, below 2^127.
LARGEST_COTANGENT = 2.0**20
LARGEST_SMALL = 40.0  # e^-40 is 2^-58: normal, and so are sums of e^40


class Kind(IntEnum):
    """What a batch element's numbers allow.

    UNBOUNDED : a result may overflow or be NaN: for the reference.
    BOUNDED : all is finite, scores are at most `LARGEST_SCORE` and values (v
        and, backward, out, dout, dlse; tangents) at most `LARGEST_VALUE`, or
        `LARGEST_COTANGENT` in a double backward. A logit (a bias, say) and
        lse may be -inf. What score_mod makes of scores is not known before
        (see `flagged.beyond`).
    SMALL : moreover exp(S) and its sums are normal numbers, without m.
    """

    UNBOUNDED = 0
    BOUNDED = 1
    SMALL = 2


def kinds(
    q: np.ndarray,
    k: np.ndarray,
    values: Sequence[np.ndarray],
    options: dict[str, Any],
    lse: np.ndarray | None = None,
    largest: float = LARGEST_VALUE,
) -> np.ndarray:
    """Return the `Kind` of each batch element, (batch,).

    largest : of values.
    """
    scale, lengths = options["scale"], (_longest(q), _longest(k))
    score = abs(scale) * lengths[0] * lengths[1]
    # Nor is one of the three large where another is 0.
    bounded = score <= LARGEST_SCORE
    for x in lengths:
        bounded = bounded & (max(1, abs(scale)) * x <= LARGEST_SCORE)
    for x in values:
        bounded = bounded & (_largest(x) <= largest)
    upper: list[Any] = [lse, *map(options.get, LOGITS)]
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        bounded = bounded & (_largest(slopes) <= LARGEST_VALUE)
        upper.append(-slopes * (q.shape[-2] + k.shape[-2]))
    for x in upper:
        if x is not None:
            bounded = bounded & (_maximum(x) <= LARGEST_SCORE)
    # UNBOUNDED is 0, and all that are SMALL are BOUNDED.
    found: np.ndarray = bounded * of_bounded(score, options)
    return found


def of_bounded(score: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Return the `Kind` of batch elements that are SMALL or BOUNDED.

    score : (batch,), the largest |scale * q k| that there may be.
    """
    small = score <= LARGEST_SMALL
    if options.keys() & {"bias", "alibi_slopes", "score_mod"}:
        small = small & False
    for name in options.keys() & LOGITS.keys():
        small = small & (_maximum(options[name]) <= LARGEST_SMALL)
    found: np.ndarray = small + int(Kind.BOUNDED)  # or the next, SMALL
    return found


def _longest(x: np.ndarray) -> np.ndarray:
    """The length of the longest vector of each batch element."""
    squares = np.einsum("...c,...c->...", x, x)
    return np.sqrt(squares.max(axis=(1, 2, 3), initial=0))


def _maximum(x: np.ndarray) -> np.ndarray:
    """The largest number of each batch element, NaN if there is one."""
    return x.max(axis=tuple(range(1, x.ndim)), initial=-np.inf)


def _largest(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of each batch element, NaN if there is one."""
    least = x.min(axis=tuple(range(1, x.ndim)), initial=np.inf)
    return np.maximum(_maximum(x), -least)
