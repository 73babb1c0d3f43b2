"""NaN and inf reach what reads them, and nothing else.

Scores are moderate here (head_dim 16 or more, normal inputs), so that no
weight underflows, which would make inf of the reference 0 * inf in a kernel.
"""

import numpy as np
import pytest
from hypothesis import strategies as st

import strategies
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.backends import EMULATED, on_each_kind, on_kernels
from helpers.checks import check_gradients
from helpers.compare import (
    assert_all,
    assert_arrays_equal,
    assert_finite,
    assert_forward_matches,
    assert_gradients_match,
    assert_matches,
)
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES

NAMES = ("q", "k", "v", "dout")
each_dtype = {"dtype": DTYPES}


@on_each_backend(
    strategies.spoiled,
    each=each_dtype,
    names=NAMES[:3],
    archs=strategies.FAMILIES,
    # Four lanes wrote a row's maximum, which is the same in all of them.
    examples=[
        Case("float16", spoiled=(("v", (0, 0, 0, 0), "nan"),)),
        # Not in the first tile of queries.
        Case(
            "float16", seqlen_q=200, seqlen_k=90, causal=True,
            spoiled=(("q", (0, 150, 0, 3), "nan"),),
            on=Emulation("sm_90a", num_sms=1),
        ),
    ],
)  # fmt: skip
def test_forward(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_backend(
    strategies.spoiled,
    each=each_dtype,
    names=NAMES,
    archs=strategies.FAMILIES,
)
def test_backward(backend, case):
    q, k, v, dout = inputs(case)
    grads = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    # dP - delta of an inf less an inf hangs on how delta is summed.
    assert_gradients_match(grads, want, case, kinds=False)


@st.composite
def cases_with_blind_rows(draw, backend, dtype, archs):
    seqlen_q = draw(st.integers(2, 150))
    case = Case(
        dtype,
        seqlen_q=seqlen_q,
        seqlen_k=draw(st.integers(0, seqlen_q - 1)),
        causal=True,
        seed=draw(strategies.SEEDS),
    )
    return draw(strategies.on_backend(case, backend, archs))


@on_each_backend(
    cases_with_blind_rows, each=each_dtype, archs=strategies.FAMILIES
)
def test_rows_that_see_nothing_give_nothing(backend, case):
    """For any q and dout of these rows."""
    num_blind = case.seqlen_q - case.seqlen_k
    blind = np.s_[:, :num_blind]
    q, k, v, dout = inputs(case)
    want = expected.backward(dout, q, k, v, **case.meaning())
    q[blind], dout[blind] = np.nan, np.inf
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out[blind], 0, "out[blind]", case)
    assert_all(lse[..., :num_blind], -np.inf, "lse[..., :num_blind]", case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    assert_gradients_match(grads, want, case)


def with_row_of_minus_infinity(dtype, on, seqlen_k):
    """Return a case and its inputs: query 7 scores -inf everywhere."""
    case = Case(
        dtype,
        seqlen_q=80,
        seqlen_k=seqlen_k,
        head_dim=1,
        on=on,
    )
    q, k, v, dout = inputs(case)
    q[:, 7] = -np.inf
    return case, (q, np.abs(k) + k.dtype.type(1), v, dout)


@on_each_kind
@pytest.mark.parametrize("seqlen_k", [1, 100])
def test_scores_of_minus_infinity_have_no_weight(backend, dtype, on, seqlen_k):
    case, (q, k, v, dout) = with_row_of_minus_infinity(dtype, on, seqlen_k)
    out, lse = calls.forward(backend, case, q, k, v)
    assert_all(out[:, 7], 0, "out[:, 7]", case)
    assert_all(lse[..., 7], -np.inf, "lse[..., 7]", case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    # dS is 0, and 0 * -inf is in every dk.
    assert_all(grads[1], np.nan, "dk", case)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


def check_key_of_minus_infinity(backend, case):
    q, k, v, dout = inputs(case)
    q, k[:, 7] = np.abs(q) + q.dtype.type(1), -np.inf
    grads = calls.gradients(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


@on_each_kind
def test_a_key_of_minus_infinity_has_no_weight(backend, dtype, on):
    """Padding rows of a tile must not read it: 0 * -inf is NaN."""
    case = Case(dtype, seqlen_q=80, seqlen_k=100, head_dim=1, on=on)
    check_key_of_minus_infinity(backend, case)


@pytest.mark.parametrize("backend", [EMULATED])
def test_a_key_of_minus_infinity_by_wide_tiles(backend):
    on = Emulation("sm_90a", backward_tile=Tile(64, 64, 16, 1, 3, 4, 1, 3))
    case = Case(
        "bfloat16", seqlen_q=80, seqlen_k=100, head_dim=1, head_dim_v=1, on=on
    )
    check_key_of_minus_infinity(backend, case)


@on_each_kind
def test_masked_tiles_of_nan_do_not_spread(backend, dtype, on):
    """Rows of NaN only; 40 of 104 queries see none of them."""
    case = Case(
        dtype, seqlen_q=104, seqlen_k=128, head_dim=64, head_dim_v=64,
        causal=True, on=on,
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    k[:, 64:], v[:, 64:] = np.nan, np.nan
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_finite(grads[0][:, :40], "grads[0][:, :40]", case)
    assert_gradients_match(grads, want, case)


@on_each_kind
def test_infinities_of_both_signs_are_nan(backend, dtype, on):
    """In all columns of dv; and so if a query that is masked has a NaN."""
    case = Case(
        dtype, seqlen_q=104, seqlen_k=128, head_dim=64, head_dim_v=64,
        causal=True, on=on,
    )  # fmt: skip
    q, k, v, dout = inputs(case)
    dout[:, 0], dout[:, 100], dout[:, 101] = np.nan, np.inf, -np.inf
    dv = calls.gradients(backend, case, q, k, v, dout)[2]
    want = expected.backward(dout, q, k, v, **case.meaning())[2]
    assert_all(dv[:, 25:125], np.nan, "dv[:, 25:125]", case)
    assert_matches(dv, want, "dv", case)


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_before_a_key_of_their_tile(backend, head_dim):
    """Keys that do not see them keep their gradients, of each head alone.

    The first and last query of a tile of 64, and the next.
    """
    spoiled = tuple(
        (x, (b, query, head), "nan")
        for b, x in enumerate(("q", "dout"))
        for head, query in enumerate((0, 63, 64))
    )
    check_gradients(backend, Case(
        "bfloat16", 2, 140, 140, 3, 3, head_dim, head_dim, causal=True,
        spoiled=spoiled, on=Emulation("sm_90a"),
    ))  # fmt: skip


@on_each_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_of_minus_infinity_are_read(backend, dtype, on, bad):
    """A visible pair of weight 0 counts: 0 * NaN and 0 * inf are NaN."""
    case, (q, k, v, dout) = with_row_of_minus_infinity(dtype, on, 100)
    v[:, 90, :, 3], dout[:, 7, :, 5] = bad, bad
    out, lse = calls.forward(backend, case, q, k, v)
    assert_arrays_equal(
        np.isnan(out[0, 7, 0]), np.arange(16) == 3, "np.isnan(out[0, 7, 0])"
    )
    assert_all(lse[..., 7], -np.inf, "lse[..., 7]", case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case, kinds=False)


@on_each_kind
def test_a_weight_that_underflows_is_read(backend, dtype, on):
    """The value of key 3 is inf, its weight exp(-2000): 0 * inf is NaN."""
    case = Case(
        dtype, seqlen_q=20, seqlen_k=20, head_dim=1, scale=1.0, causal=True,
        on=on,
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    q[...], k[...], k[:, 3], v[:, 3, :, 0] = 1, 0, -2000, np.inf
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_all(got[0][0, 3:, 0, 0], np.nan, "got[0][0, 3:, 0, 0]", case)
    assert_forward_matches(got, want, case)


@on_each_kind
def test_infinities_meet_weights_of_1_and_0(backend, dtype, on):
    """Consecutive rows see the key with weight 0, between, and 1."""
    case = Case(
        dtype, seqlen_q=20, seqlen_k=20, head_dim=1, scale=-1.0, causal=True,
        on=on,
    )  # fmt: skip
    q, k, v, _ = inputs(case)
    q[0, :, 0, 0] = np.resize([-1, 0, 1], 20)
    k[...], k[:, 0], k[:, 3] = 0, 1000, -1000
    v[:, 3, :, 0], v[:, 3, :, 1] = np.inf, -np.inf
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)
