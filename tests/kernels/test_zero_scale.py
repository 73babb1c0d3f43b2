"""A scale of 0: all keys that a query sees have the same weight."""

import numpy as np

from helpers import calls
from helpers.backends import on_each_kind
from helpers.compare import assert_all, assert_bitwise
from helpers.data import Case, inputs


@on_each_kind
def test_queries_before_the_first_key(backend, dtype, on):
    """Whole tiles see none, some rows, or the key: 0 * -inf is NaN."""
    case = Case(
        dtype, seqlen_q=200, seqlen_k=1, causal=True, scale=0.0,
        on=on,
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out[:, :-1], 0, "out[:, :-1]", case)
    assert_all(lse[..., :-1], -np.inf, "lse[..., :-1]", case)
    assert_bitwise(out[:, -1:], v, "out[:, -1:]")
    assert_all(lse[..., -1], 0, "lse[..., -1]", case)
