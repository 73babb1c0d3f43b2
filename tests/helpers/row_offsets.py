"""Biases that add a large number to all scores of a row.

Scores of `halves` (data.py) are multiples of 1/2, and few: they stay exact in
sums up to 2^22 (float64: 2^51), where lse is rounded to 1/2: by up to a factor
of e^(1/4) in P. Those of queries of 0 are 0, exact beside any number: there
lse loses log l, and exp(S - lse) is 1 for each key.
"""

import numpy as np

from .data import ZERO_QUERIES
from .dtypes import DTYPES, lse_dtype

EXACT = 0.0, 2.0**22, -(2.0**22), 2.0**21
HUGE = 0.0, -1e9, 1e9, -1e30
assert len(HUGE) == ZERO_QUERIES


def row_offsets(case, exact=EXACT):
    """Return a bias, (1, heads, seqlen_q, seqlen_k), the same for all keys.

    Heads differ; a case has a multiple of four queries, at least eight.

    exact : the offsets of all queries but the last.
    """
    further = 2.0**29 if case.dtype == "float64" else 1.0
    repeats = (case.seqlen_q - ZERO_QUERIES) // len(exact)
    rows = [
        [*np.roll(exact, head)] * repeats + [*np.roll(HUGE, head)]
        for head in range(case.num_heads_q)
    ]
    bias = further * np.array(rows)[None, :, :, None]
    shape = (*bias.shape[:3], case.seqlen_k)
    return np.broadcast_to(bias, shape).astype(lse_dtype(DTYPES[case.dtype]))
