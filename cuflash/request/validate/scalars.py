"""Arguments that are no arrays: what calls share, and those of options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from cuflash.errors import UnsupportedError, ValueRangeError, in_words
from cuflash.request import checks
from cuflash.request.options import BY_NAME, TABLE
from cuflash.request.problem import MAX_SPLITS

PRECISIONS = ("tf32x3",)

# Kernels for types below float64 keep scale * log2(e) in float32, whose
# largest number is 3.4e38.
MAX_SCALE = 1e38


# Scale, causal, block_q, block_k and precision, checked.
Scalars = tuple[
    float | None, bool, int | None, int | None, Literal["tf32x3"] | None
]


def scalars_of(
    scale: Any, causal: Any, block_q: Any, block_k: Any, precision: Any
) -> Scalars:
    """Check what all calls on q, k and v have."""
    return (
        None if scale is None else scale_of(scale),
        checks.flag("causal", causal),
        None if block_q is None else _block_of("block_q", block_q),
        None if block_k is None else _block_of("block_k", block_k),
        None if precision is None else _precision_of(precision),
    )


def scale_of(scale: Any) -> float:
    """Check `scale`: a finite number."""
    cure = ", or None for head_dim ** -0.5"
    if hasattr(scale, "shape"):
        scaled = "pass scale=1 and q * scale"
        if math.prod(scale.shape) == 1:
            scaled = f"pass scale.item(); if it has a gradient, {scaled}"
        cure += f": {scaled}"
    return checks.real("scale", scale, cure, ": it multiplies every score")


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


def _precision_of(precision: Any) -> Literal["tf32x3"]:
    if precision not in PRECISIONS:
        raise ValueRangeError(
            f"precision is {in_words(precision)}, expected "
            f"{' or '.join(map(repr, PRECISIONS))}, or None for the "
            "precision of the dtype"
        )
    return precision


def splits_of(num_splits: Any) -> int:
    """Check `num_splits`: an int in range."""
    cure = ", or None for the fastest number"
    why = ": it counts the parts into which the keys of a head are cut"
    return checks.whole("num_splits", num_splits, 1, MAX_SPLITS, cure, why)


def _block_of(name: str, block: Any) -> int:
    cure = ", or None for the tuned size"
    why = ": it counts the tokens of a tile"
    return checks.whole(name, block, 1, None, cure, why)


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


Numbers = tuple[tuple[str, Any], ...]  # (name, value), hashable


def numbers_of(given: Mapping[str, Any]) -> tuple[Numbers, int]:
    """Check the options that are not arrays; return the seed separately.

    Parameters
    ----------
    given : mapping of str to object
        All options that the user passed.

    Returns
    -------
    numbers : tuple of (str, object)
        The options that are present, as fields of `Problem`.
    seed : int
    """
    # return_dbias=False does not require bias. NumPy's False comes here too:
    # it is not the default object.
    gradients = {
        option.name: option.check(option.name, given[option.name])
        for option in TABLE
        if option.of_gradients and option.check and option.name in given
    }
    _check_partners(
        {
            name: x
            for name, x in given.items()
            if name in BY_NAME and gradients.get(name, True)
        }
    )
    scalars = {}
    for option in TABLE:
        if option.check and option.name in given:
            value = option.check(option.name, given[option.name])
            if value != option.nothing:
                scalars[option.name] = value
    seed = scalars.pop("seed", None)
    if seed is None and "dropout" in scalars:
        raise ValueRangeError(
            "seed is None, expected an int because dropout is given: forward "
            "and backward must drop the same pairs"
        )
    return tuple(scalars.items()), seed or 0


def _check_partners(given: Mapping[str, Any]) -> None:
    """Check the options that require or exclude one another."""
    for name in given:
        for needed in BY_NAME[name].needs:
            checks.check_partner(
                name, needed, given, "neither has an effect alone"
            )
    for name in given:
        for other in BY_NAME[name].not_with:
            if other in given:
                raise UnsupportedError(
                    f"{name} is given with {other}, expected one of "
                    "them: packed sequences do not support bias, mask or "
                    "segment ids"
                )
