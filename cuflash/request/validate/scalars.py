"""Numbers that calls share: scale, blocks, splits, precision, bounds."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal

from cuflash.errors import DTypeError, ValueRangeError, in_words
from cuflash.request.problem import MAX_SPLITS

PRECISIONS = ("tf32x3",)

# Kernels for types below float64 keep scale * log2(e) in float32, whose
# largest number is 3.4e38.
MAX_SCALE = 1e38


def scale_of(scale: Any) -> float | None:
    """Check `scale`: a finite number, or None."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise DTypeError(
            f"scale is {in_words(scale)}, expected a real number, or None for "
            f"head_dim ** -0.5{_scale_as_number(scale)}"
        )
    try:
        value = float(scale)
    except OverflowError:  # an int beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise ValueRangeError(
            f"scale is {scale}, expected a finite number: it multiplies "
            "every score"
        )
    return value


def _scale_as_number(scale: Any) -> str:
    """What to do with a scale that is an array."""
    if not hasattr(scale, "shape"):
        return ""
    scaled = "pass scale=1 and q * scale"
    if math.prod(scale.shape) == 1:
        return f": pass scale.item(); if it has a gradient, {scaled}"
    return f": {scaled}"


def default_scale(scale: float | None, head_dim: int, dtype: str) -> float:
    """The scale, checked against the range of scores, or its default."""
    if scale is None:
        return head_dim**-0.5
    if dtype != "float64" and abs(scale) > MAX_SCALE:
        raise ValueRangeError(
            f"scale is {scale}, expected at most {MAX_SCALE} in magnitude: "
            f"scores of {dtype} arrays are float32"
        )
    return scale


def precision_of(precision: Any) -> Literal["tf32x3"] | None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueRangeError(
            f"precision is {in_words(precision)}, expected "
            f"{' or '.join(map(repr, PRECISIONS))}, or None for the "
            "precision of the dtype"
        )
    return precision


def splits_of(num_splits: Any) -> int | None:
    """Check `num_splits`: an int in range, or None."""
    if num_splits is None:
        return None
    if isinstance(num_splits, bool) or not isinstance(
        num_splits, numbers.Integral
    ):
        raise DTypeError(
            f"num_splits is {in_words(num_splits)}, expected an int, or None "
            "for the fastest number"
        )
    value = int(num_splits)
    if not 1 <= value <= MAX_SPLITS:
        raise ValueRangeError(
            f"num_splits is {value}, expected 1 to {MAX_SPLITS}: it counts the"
            " parts into which the keys of a head are cut"
        )
    return value


def block_of(name: str, block: Any) -> int | None:
    if block is None:
        return None
    if isinstance(block, bool) or not isinstance(block, numbers.Integral):
        raise DTypeError(
            f"{name} is {in_words(block)}, expected an int, or None for the "
            "tuned size"
        )
    value = int(block)
    if value < 1:
        raise ValueRangeError(
            f"{name} is {value}, expected at least 1: it counts the tokens "
            "of a tile"
        )
    return value


def bounds_that_mask(
    causal: bool,
    window: tuple[int | None, int | None],
    seqlen_q: int,
    seqlen_k: int,
    packed: bool,
) -> tuple[bool, tuple[int | None, int | None]]:
    """Normalise causal and window: see `problem.Problem`.

    The last query is at the position of the last key, so it reaches the first
    key with left = seqlen_k - 1. The first query reaches the last key with
    right = seqlen_q - 1. Larger bounds mask nothing.
    """
    left, right = window
    if causal or right == 0:
        causal, right = True, None
    if not packed:
        left = None if left is None or left >= seqlen_k - 1 else left
        right = None if right is None or right >= seqlen_q - 1 else right
    return causal, (left, right)
