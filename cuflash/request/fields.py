"""Fields of `OptionNumbers` that follow from a call: a function an option."""

from __future__ import annotations

from typing import Any

from cuflash.request import layouts
from cuflash.request import softcap as softcaps
from cuflash.request.problem import Signature


def window(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    left, right = p.window
    if p.causal:
        right = 0
    return {
        "window_left": p.seqlen_k if left is None else left,
        "window_right": p.seqlen_q if right is None else right,
    }


def softcap(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    terms = softcaps.terms(p.scale, p.softcap)
    poly3 = softcaps.poly3_terms(p.scale, p.softcap, p.dtype, p.dropout)
    names = (
        "poly4_terms", "poly4_terms_log2", "poly4_most", "poly4_inverse_log2",
        "poly3_terms_log2", "poly3_most", "poly3_lowest",
    )  # fmt: skip
    values = zip(names, (*terms, *poly3), strict=True)
    return {"softcap": p.softcap, **dict(values)}


def dropout(signature: Signature) -> dict[str, Any]:
    dropped = signature.problem.dropout
    return {
        "keep_factor": 1.0 / (1.0 - dropped),
        "drop_below": int(dropped * 2.0**32),
    }


def sequences(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    return {
        "num_sequences": p.num_sequences or 0,
        "total_q": p.seqlen_q,
        "total_k": p.seqlen_k,
    }


def longest_q(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    longest = p.seqlen_q if p.max_seqlen_q is None else p.max_seqlen_q
    return {"max_seqlen_q": longest}


def longest_k(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    longest = p.seqlen_k if p.max_seqlen_k is None else p.max_seqlen_k
    return {"max_seqlen_k": longest}


def dbias(signature: Signature) -> dict[str, Any]:
    return {"dbias_stride": layouts.sum_strides(signature.bias_shape)}
