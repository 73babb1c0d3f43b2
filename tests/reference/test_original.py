"""FlashAttention's own update, and the demo of [004] in single precision."""

import numpy as np
import pytest
from hypothesis import given

from cuflash.reference import backward, original
from cuflash.reference.attention import attention, attention_vjp
from helpers.compare import assert_allclose
from helpers.reference_cases import ReferenceCase, assert_close, bounds
from reference_strategies import reference_cases

NAMES = ("dq", "dk", "dv")
# float32's rounding errors are this many times float64's.
FLOAT32 = 2.0**29
# [004]: 128 tokens, head_dim 64, tiles of 32.
DEMO = ReferenceCase(
    seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64, block_q=32,
    block_k=32,
)  # fmt: skip


def run(case, q, k, v, dout):
    """Return out and the gradients, in the dtype of the arguments."""
    keywords = {"scale": case.scale, **case.blocks()}
    out, m, l = original.forward(q, k, v, **keywords)  # noqa: E741
    return out, *original.backward(dout, q, k, v, out, m, l, **keywords)


def assert_is_attention(case, arrays, scale_of_bounds=1.0):
    q, k, v, dout = arrays
    got = run(case, *arrays)
    expected = (
        attention(q, k, v, scale=case.scale)[0],
        *attention_vjp(dout, q, k, v, scale=case.scale),
    )
    bound = bounds(case, *(np.float64(x) for x in arrays))
    for name, a, b in zip(("out", *NAMES), got, expected, strict=True):
        most = scale_of_bounds * getattr(bound, name)
        assert_close(np.float64(a), b, most, name)


@given(reference_cases(smallest=1))
def test_original_is_attention(case):
    shape = (case.seqlen_q, case.seqlen_k, case.head_dim, case.head_dim_v)
    case = ReferenceCase(
        (), *shape, False, case.scale, case.block_q, case.block_k, case.seed
    )
    assert_is_attention(case, case.arrays())


def test_demo_in_float64_is_attention():
    assert_is_attention(DEMO, DEMO.arrays())


def test_demo_in_float32_is_within_its_rounding():
    arrays = [np.float32(x) for x in DEMO.arrays()]
    assert all(x.dtype == np.float32 for x in run(DEMO, *arrays))
    assert_is_attention(DEMO, arrays, FLOAT32)


def test_demo_errs_as_the_document_does():
    # [004] prints 4.8e-7 for out, 6.6e-7, 1.8e-7 and 1.5e-7 for dq, dk, dv,
    # of numbers that it does not fix: its largest holds for all.
    q, k, v, dout = arrays = [np.float32(x) for x in DEMO.arrays()]
    expected = attention(q, k, v)[0], *attention_vjp(dout, q, k, v)
    errors = [
        abs(a - b).max()
        for a, b in zip(run(DEMO, *arrays), expected, strict=True)
    ]
    assert 2.0**-24 < max(errors) <= 6.6e-7


def test_update_of_the_worked_example():
    # [002]'s row 0, tiles of two: l 1.368 and 1.639; O is what [002]'s
    # accumulators, 2.84 4.21 ... and 11.81 13.44 ..., are when divided by l.
    values = np.arange(1.0, 17.0).reshape(4, 4)
    scores = np.array([[1.0, 0, 2, 0]])
    state = np.array([-np.inf]), np.zeros(1), np.zeros((1, 4))
    for tile, m, l, o in (  # noqa: E741
        (slice(0, 2), 1, 1.368, [2.076, 3.076, 4.076, 5.076]),
        (slice(2, 4), 2, 1.639, [7.204, 8.204, 9.204, 10.204]),
    ):
        state = original.update(*state, scores[:, tile], values[tile])
        assert state[0] == m
        assert_allclose(state[1], l, "state[1]", atol=0.0005)
        assert_allclose(state[2][0], o, "state[2][0]", atol=0.0005)


def test_every_row_of_o_is_an_average_of_values_after_every_tile():
    # O is divided by l, so ones stay ones; l O alone would grow.
    m, l, o = np.array([-np.inf]), np.zeros(1), np.zeros((1, 1))  # noqa: E741
    for score in (0.0, 9.0, -9.0, 300.0):
        s, one = np.array([[score]]), np.ones((1, 1))
        m, l, o = original.update(m, l, o, s, one)  # noqa: E741
        # alpha l + beta rounds in l' and in O' alike, the division once.
        assert o == pytest.approx(1, rel=2.0**-52)


def test_probabilities_of_m_and_l_are_those_of_lse():
    q, k, v, dout = DEMO.arrays()
    out, m, l = original.forward(q, k, v, **DEMO.blocks())  # noqa: E741
    p = original.probabilities(q @ k.T / 8, m, l)
    one, count = np.ones(128), 3 * 128 + 64  # roundings: S, exp, sums of l
    assert_allclose(
        p.sum(axis=1), one, "p.sum(axis=1)", rtol=4 * count * 2.0**-53
    )
    lse = m + np.log(l)
    got = original.backward(dout, q, k, v, out, m, l, **DEMO.blocks())
    expected = backward.key_outer(dout, q, k, v, out, lse, **DEMO.blocks())
    bound = bounds(DEMO, q, k, v, dout)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert_close(a, b, getattr(bound, name), name)


def test_first_formula_of_the_documents_ds_lacks_a_factor():
    # [004]: dS = dP P - rowsum(dP P). A row of dS must add up to 0, because
    # softmax does not see what is added to a whole row.
    p, dp = np.array([[0.25, 0.75]]), np.array([[4.0, 8.0]])
    total = (dp * p).sum(axis=1, keepdims=True)
    assert (dp * p - total).sum() == -7
    assert (dp * p - p * total).sum() == 0
