"""Scores from -1e30 to 1e30, ties, subnormals, and rows that see nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import calls, expected, extreme
from helpers.backends import on_backends
from helpers.compare import assert_forward_matches, assert_gradients_match
from helpers.data import Case, inputs
from helpers.dtypes import DTYPES

dtypes = pytest.mark.parametrize("dtype", DTYPES)
seeds = st.integers(0, 2**32 - 1)


def draw_inputs(family, dtype, rows, keys, seed):
    rng = np.random.default_rng(seed)
    scores = family(rng, (rows, keys), dtype)
    return extreme.from_scores(scores, dtype, rng)


@on_backends
@dtypes
@given(
    family=st.sampled_from(extreme.FAMILIES),
    rows=st.integers(1, 70),
    keys=st.sampled_from([1, 40, 200]),
    causal=st.booleans(),
    seed=seeds,
)
def test_forward(backend, dtype, family, rows, keys, causal, seed):
    q, k, v, _ = draw_inputs(family, dtype, rows, keys, seed)
    case = Case(dtype, scale=1.0, causal=causal, seed=seed)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning(), exact_scores=True)
    assert_forward_matches(got, want, case)


@on_backends
@dtypes
@given(
    family=st.sampled_from(extreme.WITH_ONE_MAXIMUM),
    rows=st.integers(1, 70),
    keys=st.sampled_from([2, 40]),
    seed=seeds,
)
def test_backward(backend, dtype, family, rows, keys, seed):
    q, k, v, dout = draw_inputs(family, dtype, rows, keys, seed)
    case = Case(dtype, scale=1.0, seed=seed)
    grads = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(
        dout, q, k, v, **case.meaning(), exact_scores=True
    )
    assert_gradients_match(grads, want, case)


@on_backends
@dtypes
@given(rows=st.integers(1, 70), keys=st.integers(1, 140), seed=seeds)
def test_subnormal_inputs(backend, dtype, rows, keys, seed):
    """Everything is below the smallest normal number of the dtype."""
    case = Case(dtype, seqlen_q=rows, seqlen_k=keys, scale=1.0, seed=seed)
    small = np.float64(subnormal(dtype))
    q, k, v, dout = (
        (x.astype(np.float64) * small).astype(x.dtype) for x in inputs(case)
    )
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)
    grads = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


@on_backends
@dtypes
@pytest.mark.parametrize("seqlen_k", [0, 1, 70])
def test_rows_that_see_nothing(backend, dtype, seqlen_k):
    """Bottom-right aligned: the first seqlen_q - seqlen_k rows are blind."""
    case = Case(dtype, seqlen_q=150, seqlen_k=seqlen_k, causal=True)
    q, k, v, dout = inputs(case)
    blind = case.seqlen_q - seqlen_k
    out, lse = calls.forward(backend, case, q, k, v)
    assert not out[:, :blind].any() and np.isfinite(out).all()
    assert (lse[..., :blind] == -np.inf).all()
    assert np.isfinite(lse[..., blind:]).all()
    dq, dk, dv = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert not dq[:, :blind].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def subnormal(dtype):
    """An eighth of the smallest normal number."""
    if dtype == "float16":
        return 2.0**-17
    return 2.0**-1025 if dtype == "float64" else 2.0**-129
