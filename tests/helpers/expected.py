"""Combines the reference, `low` and `tiny` of a call."""

import numpy as np

from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.forward import max_score as reference_max_score

from . import low
from .compare import GRADIENT_FACTOR, OUT_FACTOR, Expected
from .heads import heads_first, heads_last, sum_groups
from .options import of_reference, terms_of
from .rounding import Rounding, finite


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _reference_forward(q, k, v, scale, options):
    heads = q.shape[2]
    with np.errstate(all="ignore"):
        return attention(
            *(heads_first(x, heads) for x in (q, k, v)),
            scale=scale,
            **of_reference(q, options),
        )


def forward(q, k, v, *, scale=None, exact_scores=False, sums=None, **options):
    """Return the expected out and lse of a call.

    Parameters
    ----------
    q, k, v : ndarray
        4-D, in the public layout.
    exact_scores : bool
        See `Rounding`.
    sums : dict, optional
        How sums are computed: further arguments of `Rounding`.
    **options
        The call's, causal among them.

    Returns
    -------
    out, lse : Expected
    """
    scale, terms = _scale(scale, q), terms_of(q, k, **options)
    out, lse = _reference_forward(q, k, v, scale, options)
    tame = (_tame(x) for x in (q, k, v))
    with np.errstate(all="ignore"):
        plain = low.forward(*tame, terms, scale=scale)
        rounding = Rounding(
            None, q, k, v, lse, terms, scale=scale, exact_scores=exact_scores,
            **(sums or {}),
        )  # fmt: skip
        out_error, lse_error = rounding.out(), rounding.lse()
    return (
        Expected(heads_last(out), plain, heads_last(out_error), OUT_FACTOR),
        # lse has no `low`: its bound is derived alone.
        Expected(lse, lse, lse_error, 0),
    )


def max_score(q, k, *, scale=None, sums=None, **options):
    """Return the expected largest score of each row, as `forward` out."""
    scale, terms = _scale(scale, q), terms_of(q, k, **options)
    q_heads, k_heads = (heads_first(x, q.shape[2]) for x in (q, k))
    with np.errstate(all="ignore"):
        largest = reference_max_score(
            q_heads, k_heads, scale=scale, **of_reference(q, options)
        )
        _, lse = _reference_forward(q, k, k, scale, options)
        rounding = Rounding(
            None, q, k, k, lse, terms, scale=scale, exact_scores=False,
            **(sums or {}),
        )  # fmt: skip
        return Expected(largest, largest, rounding.max_score(), 0)


def backward(
    dout, q, k, v, *, scale=None, exact_scores=False, dlse=None, sums=None,
    **options,
):  # fmt: skip
    """Return the expected dq, dk and dv of a call.

    Returns
    -------
    dq, dk, dv : Expected
        And dbias if there is a bias, dsink if there is a sink.
    """
    scale, terms = _scale(scale, q), terms_of(q, k, **options)
    heads, heads_kv = q.shape[2], k.shape[2]
    with np.errstate(all="ignore"):
        dq, dk, dv, *others = attention_vjp(
            *(heads_first(x, heads) for x in (dout, q, k, v)),
            scale=scale,
            dlse=dlse,
            **of_reference(q, options),
        )
        refs = dq, sum_groups(dk, heads_kv), sum_groups(dv, heads_kv)
        refs = [*map(heads_last, refs), *others]
        _, lse = _reference_forward(q, k, v, scale, options)
        tame = (_tame(x) for x in (dout, q, k, v))
        bias = options.get("bias")
        plain = low.backward(
            *tame, terms, scale=scale, bias=bias, dlse=_tame(dlse)
        )
        rounding = Rounding(
            dout, q, k, v, lse, terms, scale=scale, exact_scores=exact_scores,
            **(sums or {}),
        )  # fmt: skip
        dq, dk, dv, *others = rounding.gradients(bias, dlse)
        errors = [*map(heads_last, (dq, dk, dv)), *others]
    return tuple(
        Expected(r, p, e, GRADIENT_FACTOR)
        for r, p, e in zip(refs, plain, errors, strict=True)
    )


def _tame(array):
    """Replace non-finite values by 0; see `Rounding`."""
    return None if array is None else finite(array).astype(array.dtype)
