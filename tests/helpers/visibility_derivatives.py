"""Probes of visibility for `jvp` and `double_backward`.

Scores are 0, as in visibility.py, and P is 1 / count. Tangents make

    X'_ij = code(i) k_j0 + 2 q_i0 code(j)

one of -3, -1, 1, 3 for each pair, with the mean b_i of a row. dout is count
times its codes and dlse is count: then D is 0, dS 1 and T is X' - b. What
results are, those of queries times count, is a sum over the visible pairs, to
some columns of which each pair adds at least 1:

    out_dot  (X' - b) v + v_dot   lse_dot  X'
    d2q      (X' - b) k + k_dot   d2k      (X' - b) q + q_dot
    d2v      (X' - b) dout        ddout    as out_dot          ddlse  X'

Tangents of q and k have one column, in which they are 0 themselves; those of v
have the columns of its codes, in which dout is 0.
"""

import numpy as np

import cuflash
from cuflash.reference.double_backward import double_backward
from cuflash.reference.jvp import jvp

from .data import unlike
from .dtypes import lse_dtype
from .heads import heads_first, heads_last, sum_groups
from .visibility import HALF, codes, per_head, report


def tangents(q, k, v):
    """Return tangents of q, k and v, which are their cotangents too."""
    q_dot, k_dot, v_dot = (np.zeros_like(x) for x in (q, k, v))
    q_dot[..., HALF] = codes("q_dot", *q.shape[:3])[..., 0]
    k_dot[..., 0] = 2 * codes("k_dot", *k.shape[:3])[..., 0]
    v_dot[..., :HALF] = codes("v_dot", *v.shape[:3])
    return (
        unlike(q_dot, "q_dot"),
        unlike(k_dot, "k_dot"),
        unlike(v_dot, "v_dot"),
    )


def _run(backend, function, arrays, options):
    placed = [backend.place(x) for x in arrays]
    return [backend.fetch(x) for x in function(*placed, scale=1.0, **options)]


def _of_reference(x, heads):
    return heads_first(x, heads).astype(np.float64)


def _compare(results, wanted, times):
    """Assert that results are the wanted ones to half of a pair.

    A 16-bit kernel rounds X' - b, by at most 2^-7: with random signs, which
    codes give them, that is less than 0.1 for 131 keys. It rounds its result
    by 2^-8 of it. In the column of v that is 1, out_dot has no random signs
    and no code: it is not compared. Nor are the columns of d2q and d2k whose
    code is a factor of X' too: there all rows may be rounded the same way.
    """
    for (name, n), *pair in zip(times.items(), results, wanted, strict=True):
        got, ref = (np.asarray(x, np.float64) * n for x in pair)
        if name in ("out_dot", "ddout"):
            got, ref = got[..., :HALF], ref[..., :HALF]
        if name in ("d2q", "d2k"):
            alike = HALF if name == "d2q" else 0
            got, ref = (np.delete(x, alike, axis=-1) for x in (got, ref))
        wrong = ~(np.abs(got - ref) <= 0.5 + 2.0**-8 * np.abs(ref))
        report(wrong, name, got, ref, "sums of X' and codes")


def check_jvp(backend, seen, q, k, v, dout, **options):
    """Assert that `jvp` adds the visible pairs and no other."""
    moved = tangents(q, k, v)
    asked = options | {"return_lse": True}
    got = _run(backend, cuflash.jvp, (q, k, v, *moved), asked)
    seen, heads = per_head(seen, q), q.shape[2]
    count = np.maximum(seen.sum(-1), 1)
    want = jvp(
        *(_of_reference(x, heads) for x in (q, k, v, *moved)),
        scale=1.0,
        mask=seen.astype(bool),
        heads_first=True,
    )
    times = {"out_dot": heads_last(count[..., None]), "lse_dot": count}
    wanted = heads_last(want.out_dot), want.lse_dot
    _compare(got[2:], wanted, times)


def check_double_backward(backend, seen, q, k, v, dout, **options):
    """Assert that `double_backward` adds the visible pairs and no other."""
    seen, moved, heads = per_head(seen, q), tangents(q, k, v), q.shape[2]
    count = seen.sum(-1)
    some = np.maximum(count, 1)
    means = heads_last(seen @ heads_first(v, heads) / some[..., None])
    dout = unlike(
        (dout * heads_last(count[..., None])).astype(q.dtype), "dout"
    )
    out = unlike(means.astype(q.dtype), "out")
    wide = lse_dtype(q.dtype)
    lse = np.where(count, np.log(some), -np.inf).astype(wide)
    given = *moved, dout, q, k, v, out
    asked = {"dlse": backend.place(count.astype(wide)), "return_ddlse": True}
    got = _run(backend, cuflash.double_backward, (*given, lse),
               asked | options)  # fmt: skip
    want = double_backward(
        *(_of_reference(x, heads) for x in given),
        lse,
        dlse=count,
        scale=1.0,
        mask=seen.astype(bool),
        heads_first=True,
    )
    of_keys = (sum_groups(x, k.shape[2]) for x in (want.d2k, want.d2v))
    wanted = [*map(heads_last, (want.d2q, *of_keys, want.ddout)), want.ddlse]
    times = {"d2q": 1, "d2k": 1, "d2v": 1}
    times |= {"ddout": heads_last(some[..., None]), "ddlse": some}
    _compare(got, wanted, times)
