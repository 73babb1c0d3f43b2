"""With CUFLASH_CHECK=1: whether an lse can be that of a call's scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.api.attention import forward
from cuflash.errors import ValueRangeError
from cuflash.request.problem import Call, strip_lse
from cuflash.request.validate.host_values import first, on_host

# What `forward` does not take, or what has no effect on lse.
_WITHOUT_EFFECT = "dropout", "seed"

# Roundings of a score beside those of its products, and of a row's sum beside
# those of its terms: scale, softcap, slopes, bias, exponential, logarithm.
_OTHERS = 16


def check(call: Call, asked: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ValueRangeError if a row's weights add up to more than 1.

    They add up to exp(own - lse), where own is lse over these keys alone, and
    to less than 1 if the caller's lse covers more keys. It computes own and
    reads it, so it waits for the device. Nothing is known of a score_mod's
    rounding, so such calls are not checked.

    Parameters
    ----------
    call : Call
    asked : dict
        scale, causal, precision.
    options : dict
        Those of the table, as the user passed them.
    """
    p, given = call.problem, call.given
    if p.score_mod is not None or 0 in given["lse"].shape:
        return
    kept = {x: y for x, y in options.items() if x not in _WITHOUT_EFFECT}
    q, k = given["q"], given["k"]
    _, own = forward(q, k, k, return_lse=True, **asked, **kept)
    own, lse = (on_host(x).astype(np.float64) for x in (own, given["lse"]))
    with np.errstate(all="ignore"):
        above = own - lse
        at = first(above > _bound(call, lse))
    if at is not None:
        index = ", ".join(map(str, at))
        raise ValueRangeError(
            f"lse[{index}] is {lse[at]:.7g}, expected at least {own[at]:.7g}:"
            f" the weights of this row would add up to {np.exp(above[at]):.3g}"
            ", so lse is of another call, or of other options"
        )


def _bound(call: Call, lse: np.ndarray) -> np.ndarray:
    r"""How far two forward passes may differ in lse, in its axes.

    A score is a sum of head_dim products, of which no partial sum exceeds
    S = abs(scale) |q_i| max_j |k_j| in magnitude; slopes add at most
    max(slope) (seqlen_q + seqlen_k), and what approximates a softcap's tanh is
    off by at most 16u of the cap. Let A be cap and slopes together. With u the
    unit of rounding, 2u where tensor cores truncate, the error of a score is
    at most 2u (head_dim + 16) (S + A).
    The sum of n exponentials has the relative error 2u (n + 16), which the
    logarithm makes absolute; lse and a bias, which a score near lse has no
    larger than abs(lse) + S, are rounded once each. Twice all that, for two
    passes:

    .. math::
        4u ((head\_dim + 16) (S + A) + n + 16 + 2 |lse|)
    """
    p = call.problem
    u = float(np.finfo(p.lse_dtype).eps) / 2
    lengths = {}
    for name in "qk":
        x = on_host(call.arrays[name])
        x = x.astype(np.promote_types(p.lse_dtype, np.float32), copy=False)
        lengths[name] = np.sqrt(np.einsum("bshc,bshc->bhs", x, x))
    longest = lengths["k"].max(axis=-1, keepdims=True, initial=0)
    longest = np.repeat(longest, p.group_size, axis=1)
    sizes = abs(p.scale) * lengths["q"] * longest + p.softcap
    if p.alibi_slopes:
        slopes = np.abs(on_host(call.options["alibi_slopes"])).max(initial=0)
        sizes = sizes + float(slopes) * (p.seqlen_q + p.seqlen_k)
    rounded = (p.head_dim + _OTHERS) * strip_lse(sizes, call.rank)
    rounded = rounded + p.seqlen_k + _OTHERS
    bound: np.ndarray = 4 * u * (rounded + 2 * np.abs(lse))
    return np.where(np.isfinite(lse), bound, 4 * u * rounded)
