"""What a user's functions ask that built-in options give, faster."""

from __future__ import annotations

from typing import Any

from cuflash.expressions import builtin
from cuflash.expressions.nodes import SCORE
from cuflash.request.checks import LARGEST_SOFTCAP, SMALLEST_SOFTCAP


def as_options(
    asked: dict[str, Any],
    causal: bool,
    seqlen_q: int,
    seqlen_k: int,
    *,
    packed: bool,
    adds: bool,
) -> tuple[bool, dict[str, Any]]:
    """A call's causal and scalar options, with built-in ones where they fit.

    Parameters
    ----------
    asked : dict
        The options that are no arrays.
    causal : bool
    seqlen_q, seqlen_k : int
    packed : bool
        Whether the sequences, whose lengths nobody knows here, are packed:
        options align their ends, functions their beginnings.
    adds : bool
        Whether something is added to scores before the function gets them.
    """
    asked = dict(asked)
    if not (packed or "softcap" in asked or adds):
        _take_softcap(asked)
    if "mask_mod" in asked and not packed:
        causal = _take_bounds(asked, causal, seqlen_k - seqlen_q)
    return causal, asked


def _take_softcap(asked: dict[str, Any]) -> None:
    score = asked.get("score_mod")
    if score is None:
        return
    cap, rest = builtin.softcap(score)
    if SMALLEST_SOFTCAP <= cap <= LARGEST_SOFTCAP:
        asked["softcap"], asked["score_mod"] = cap, rest
    if asked["score_mod"] is SCORE:
        asked["score_mod"] = None


def _take_bounds(asked: dict[str, Any], causal: bool, past: int) -> bool:
    """Bounds of the distance; `past`: how many keys precede query 0's."""
    bounds, rest = builtin.distance_bounds(asked["mask_mod"])
    left, right = asked.get("window", (None, None))
    if causal:
        right = 0 if right is None else min(right, 0)
    if bounds.at_most is not None:  # kv_idx >= q_idx - at_most
        left = _least(left, bounds.at_most + past)
    if bounds.at_least is not None:  # kv_idx <= q_idx - at_least
        right = _least(right, -bounds.at_least - past)
    if min(left or 0, right or 0) < 0:
        return causal  # no window reaches less than the query's own key
    asked["window"], asked["mask_mod"] = (left, right), rest
    return right == 0


def _least(known: int | None, bound: int) -> int:
    return bound if known is None else min(known, bound)
