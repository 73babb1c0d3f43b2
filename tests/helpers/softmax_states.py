"""States for merge_states, and what merging them must give."""

import functools

import numpy as np

from .compare import Expected
from .dtypes import DTYPES, PRECISION, lse_dtype
from .rounding import finite


def states(case, count=2):
    """Return random states; some rows of each have seen no key."""
    rng = np.random.default_rng(case.seed)
    size = rng.choice([1.0, 30.0, 1e4])  # of lse
    c, dtype = case, DTYPES[case.dtype]
    made = []
    for _ in range(count):
        out = rng.standard_normal(
            (c.batch, c.seqlen_q, c.num_heads_q, c.head_dim_v)
        )
        lse = rng.standard_normal((c.batch, c.num_heads_q, c.seqlen_q)) * size
        blind = rng.random(lse.shape) < 0.2
        lse[blind] = -np.inf
        out[blind.swapaxes(1, 2)] = 0
        made.append(out.astype(dtype))
        made.append(lse.astype(lse_dtype(dtype)))
    return made


def merged(*given):
    """Merge in float64; expected values with their bounds.

    A weight exp(lse_a - lse) has the error of its argument, e (|lse_a| +
    |lse| + 4), relative to itself; the sum of n weights adds (n - 1) e, that
    of n rows as much, and every 32 states after the first multiply by one
    more weight of at most 1. The result is rounded once. lse: log and n
    additions.
    """
    u, f, e = PRECISION[given[0].dtype.name]
    exact = [x.astype(np.float64) for x in given]
    outs, lses = exact[::2], exact[1::2]
    lse = functools.reduce(np.logaddexp, lses)
    shift = np.where(lse == -np.inf, 0, lse)
    weights = [np.exp(x - shift).swapaxes(1, 2)[..., None] for x in lses]
    out = sum(w * x for w, x in zip(weights, outs, strict=True))
    size = np.max(np.abs([finite(x) for x in (*lses, lse)]), axis=0)
    rescales = 1 + (len(lses) - 1) // 32
    relative = rescales * (2 * size + 4) + 2 * (len(lses) - 1)
    weight = e * relative.swapaxes(1, 2)[..., None]
    terms = sum(w * np.abs(x) for w, x in zip(weights, outs, strict=True))
    return (
        Expected(out, out, weight * terms + u * np.abs(out) + f, 0),
        Expected(lse, lse, e * relative, 0),
    )
