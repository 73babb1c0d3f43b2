"""Packed sequences, against separate calls and against segment ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.double_backward import double_backward
from cuflash.reference.dropout import Dropout
from cuflash.reference.jvp import jvp
from cuflash.reference.packed import (
    first_bad,
    packed_attention,
    packed_attention_vjp,
    packed_double_backward,
    packed_jvp,
    spans,
)
from helpers.compare import assert_all, assert_arrays_equal, assert_finite
from helpers.reference_cases import ReferenceCase, assert_close, bounds

lengths = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5
)

HEADS = {"heads_first": True}


def packed_case(lengths, unused):
    """Return a case with `unused` extra tokens, and its offsets."""
    offsets = np.cumsum([(0, 0), *lengths], axis=0).T
    total_q, total_k = (int(x[-1]) + unused for x in offsets)
    return ReferenceCase((2,), total_q, total_k), offsets


@given(lengths, st.integers(0, 2), st.booleans())
def test_sequences_are_what_they_are_alone(lengths, unused, causal):
    case, offsets = packed_case(lengths, unused)
    q, k, v, dout = case.arrays()
    sink = np.array([0.5, -1.0])
    options = {"causal": causal, "sink": sink, **HEADS}
    out, lse = packed_attention(q, k, v, *offsets, **options)
    dq, dk, dv, _ = packed_attention_vjp(dout, q, k, v, *offsets, **options)
    for _, i, j in spans(*offsets, case.seqlen_q, case.seqlen_k):
        one = q[:, i], k[:, j], v[:, j]
        alone = attention(*one, **options)
        assert_arrays_equal(out[:, i], alone[0], "out[:, i]")
        assert_arrays_equal(lse[:, i], alone[1], "lse[:, i]")
        grads = attention_vjp(dout[:, i], *one, **options)
        assert_arrays_equal(dq[:, i], grads[0], "dq[:, i]")
        assert_arrays_equal(dk[:, j], grads[1], "dk[:, j]")
        assert_arrays_equal(dv[:, j], grads[2], "dv[:, j]")


@given(lengths)
def test_packing_is_a_mask_by_segment_ids(lengths):
    case, offsets = packed_case(lengths, 0)
    q, k, v, dout = case.arrays()
    of_q, of_k = (np.repeat(np.arange(len(lengths)), n) for n in
                  np.transpose(lengths))  # fmt: skip
    ids = {"segment_ids_q": of_q, "segment_ids_k": of_k}
    bound = bounds(case, q, k, v, dout)
    out, lse = packed_attention(q, k, v, *offsets, **HEADS)
    expected = attention(q, k, v, **ids, **HEADS)
    assert_close(out, expected[0], bound.out)
    assert_close(lse, expected[1], bound.lse)
    grads = packed_attention_vjp(dout, q, k, v, *offsets, **HEADS)
    expected = attention_vjp(dout, q, k, v, **ids, **HEADS)
    for a, b, limit in zip(
        grads, expected, (bound.dq, bound.dk, bound.dv), strict=True
    ):
        assert_close(a, b, limit)


def test_tokens_of_no_sequence_have_no_result():
    case, offsets = packed_case([(2, 3)], 1)
    q, k, v, dout = case.arrays()
    q[:, 2], k[:, 3] = np.nan, np.nan
    out, lse = packed_attention(q, k, v, *offsets, **HEADS)
    assert_all(out[:, 2], 0, "out[:, 2]")
    assert_all(lse[:, 2], -np.inf, "lse[:, 2]")
    grads = packed_attention_vjp(dout, q, k, v, *offsets, **HEADS)
    for gradient, token in zip(grads, (2, 3, 3), strict=True):
        assert_all(gradient[:, token], 0, "gradient[:, token]")
        assert_finite(gradient, "gradient")


def test_dropout_takes_a_sequence_for_a_batch():
    case, offsets = packed_case([(3, 3), (3, 3)], 0)
    q, k, v, _ = case.arrays()
    q[:, 3:], k[:, 3:], v[:, 3:] = q[:, :3], k[:, :3], v[:, :3]
    dropout = Dropout(0.5, seed=1, head=np.arange(2))
    out, _ = packed_attention(q, k, v, *offsets, dropout=dropout, **HEADS)
    alone = dropout._replace(batch=1)
    second, _ = attention(q[:, 3:], k[:, 3:], v[:, 3:], dropout=alone, **HEADS)
    assert_arrays_equal(out[:, 3:], second, "out[:, 3:]")
    assert (out[:, :3] != second).any()


def test_slopes_may_be_those_of_a_sequence():
    case, offsets = packed_case([(2, 3), (0, 1), (4, 4)], 1)
    q, k, v, dout = case.arrays()
    slopes = np.random.default_rng(0).random((3, 2))
    packed = {"alibi_slopes": slopes, **HEADS}
    out, lse = packed_attention(q, k, v, *offsets, **packed)
    grads = packed_attention_vjp(dout, q, k, v, *offsets, **packed)
    for b, i, j in spans(*offsets, case.seqlen_q, case.seqlen_k):
        one = q[:, i], k[:, j], v[:, j]
        own = {"alibi_slopes": slopes[b], **HEADS}
        alone = attention(*one, **own)
        assert_arrays_equal(out[:, i], alone[0], "out[:, i]")
        assert_arrays_equal(lse[:, i], alone[1], "lse[:, i]")
        want = attention_vjp(dout[:, i], *one, **own)
        for x, place, expected in zip(grads, (i, j, j), want, strict=True):
            assert_arrays_equal(x[:, place], expected, "x[:, place]")


@pytest.mark.parametrize(
    "offsets, bad",
    [
        ([0, 2, 5], None),
        ([0, 0, 0], None),
        ([1, 2, 5], 0),
        ([0, 3, 2], 2),
        ([0, 6, 6], 1),
        ([-1, 2, 5], 0),
        ([0, -1, 5], 1),
    ],
)
def test_first_bad_offset(offsets, bad):
    assert first_bad(np.array(offsets, np.int32), 5) == bad
    assert [*spans(offsets, [0, 1, 1], 5, 1)] == [] or bad is None


def test_sequences_have_tangents_of_their_own():
    offsets, tokens = ([0, 3, 3, 8], [0, 4, 5, 9]), (9, 10)
    rng = np.random.default_rng(0)
    q, q_dot = rng.standard_normal((2, 9, 4))
    k, v, k_dot, v_dot = rng.standard_normal((4, 10, 4))
    given = {"sink": np.ones(()), "causal": True}
    got = packed_jvp(q, k, v, *offsets, q_dot, k_dot, v_dot, **given)
    for _, i, j in spans(*offsets, *tokens):
        alone = jvp(q[i], k[j], v[j], q_dot[i], k_dot[j], v_dot[j], **given)
        for x, one in zip(got, alone, strict=True):
            assert_arrays_equal(x[i], one, "x[i]")
    assert_all(got.out_dot[8], 0, "got.out_dot[8]")
    assert not got.lse_dot[8]


def test_sequences_have_second_gradients_of_their_own():
    offsets, tokens = ([0, 3, 3, 8], [0, 4, 5, 9]), (9, 10)
    rng = np.random.default_rng(0)
    q, dout, ddq = rng.standard_normal((3, 9, 4))
    k, v, ddk, ddv = rng.standard_normal((4, 10, 4))
    given = {"sink": np.ones(()), "causal": True}
    out, lse = packed_attention(q, k, v, *offsets, **given)
    got = packed_double_backward(
        ddq, ddk, ddv, dout, q, k, v, out, lse, *offsets, **given
    )
    d2sink = 0.0
    for _, i, j in spans(*offsets, *tokens):
        own = dout[i], q[i], k[j], v[j], out[i], lse[i]
        alone = double_backward(ddq[i], ddk[j], ddv[j], *own, **given)
        for name, at in {"d2q": i, "d2k": j, "d2v": j, "ddout": i}.items():
            x, one = getattr(got, name), getattr(alone, name)
            assert_arrays_equal(x[at], one, "x[at]")
        d2sink += alone.d2sink
    assert got.d2sink == d2sink
    assert_all(got.d2q[8], 0, "got.d2q[8]")
