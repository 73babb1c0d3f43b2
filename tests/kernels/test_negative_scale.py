"""A negative scale: the key with the smallest product has the most weight."""

import pytest

from helpers import calls, expected
from helpers.backends import on_each_kind, on_each_kind_with_options
from helpers.compare import assert_forward_matches
from helpers.data import Case, inputs


def check_forward(backend, case, **how):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning(), **how)
    assert_forward_matches(got, want, case)


@on_each_kind
@pytest.mark.parametrize("values", ["one_large", "one_hugely_negative"])
def test_large_scores(backend, dtype, on, values):
    """lse equals the largest score up to rounding."""
    case = Case(
        dtype, seqlen_q=20, seqlen_k=40, head_dim=40, scale=-1.0,
        values=values, on=on,
    )  # fmt: skip
    check_forward(backend, case, exact_scores=True)


@on_each_kind_with_options
def test_beside_a_sink(backend, dtype, on):
    case = Case(
        dtype, seqlen_q=20, seqlen_k=40, scale=-0.3, arrays_of=("sink",),
        on=on,
    )  # fmt: skip
    check_forward(backend, case)
