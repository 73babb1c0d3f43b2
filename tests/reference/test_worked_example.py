"""The example that [002] of cuflash.reference works by hand, scale 1.

Expected numbers have three decimals, so they may be off by half a unit of
the third. The document rounds at every step and so differs in the last
digit of a few (D_0 34.83, l 1.638, acc 11.81).
"""

import numpy as np
import pytest

from cuflash.reference import backward, forward
from cuflash.reference.attention import (
    attention,
    gradient_steps,
    scores_of,
)
from cuflash.reference.tile_state import TileState
from helpers.compare import assert_allclose, assert_arrays_equal

Q = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
K = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
V = np.arange(1.0, 17.0).reshape(4, 4)
DOUT = np.array([[1.0] * 4, [0] * 4, [1] * 4, [0] * 4])

DV = np.repeat([[0.590], [0.217], [0.976], [0.217]], 4, axis=1)
DQ = np.zeros((4, 4))
DQ[0] = [-1.187, 1.187, 4.385, 1.915]
DQ[2] = [-3.146, 3.146, 4.276, 3.724]
DK = np.array(
    [
        [-12.993, 0, -5.571, 0],
        [-1.307, 0, -0.728, 0],
        [8.660, 0, 4.385, 0],
        [5.639, 0, 1.915, 0],
    ]
)

FORWARD = pytest.mark.parametrize(
    "schedule", [forward.query_outer, forward.key_outer, forward.split_keys]
)
BACKWARD = pytest.mark.parametrize(
    "schedule",
    [backward.query_outer, backward.key_outer, backward.two_pass],
)


def assert_three_decimals(got, expected):
    assert_allclose(got, expected, "got", atol=0.0005)


def steps():
    return gradient_steps(DOUT, Q, K, V, scale=1)


def expected_out():
    """Rows start with these numbers and increase by 1, as V's rows do."""
    return np.array([[7.204], [9.882], [6.076], [7.924]]) + np.arange(4)


def test_scores():
    expected = [[1, 0, 2, 0], [0, 1, 0, 2], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert_arrays_equal(scores_of(Q, K, 1), expected, "scores_of(Q, K, 1)")


def test_weights():
    expected = [
        [0.225, 0.083, 0.610, 0.083],
        [0.083, 0.225, 0.083, 0.610],
        [0.366, 0.134, 0.366, 0.134],
        [0.134, 0.366, 0.134, 0.366],
    ]
    assert_three_decimals(steps().p, expected)


def test_out():
    assert_three_decimals(attention(Q, K, V, scale=1)[0], expected_out())


@FORWARD
def test_out_by_tiles_of_two(schedule):
    out, _ = schedule(Q, K, V, scale=1, block_q=2, block_k=2)
    assert_three_decimals(out, expected_out())


def test_dv():
    assert_three_decimals(steps().dv, DV)


def test_dp():
    row = [10, 26, 42, 58]
    assert_arrays_equal(steps().dp, [row, [0] * 4, row, [0] * 4], "steps().dp")


def test_delta():
    assert_three_decimals(steps().delta, [34.816, 0, 30.303, 0])
    out, _ = attention(Q, K, V, scale=1)
    assert_three_decimals(backward.delta(DOUT, out), [34.816, 0, 30.303, 0])


def test_ds():
    ds = steps().ds
    assert_three_decimals(ds[0], [-5.571, -0.728, 4.385, 1.915])
    assert_three_decimals(ds[2], [-7.421, -0.579, 4.276, 3.724])
    assert_arrays_equal(ds[[1, 3]], 0, "ds[[1, 3]]")


def test_dq_and_dk():
    assert_three_decimals(steps().dq, DQ)
    assert_three_decimals(steps().dk, DK)


@BACKWARD
def test_gradients_by_tiles_of_two(schedule):
    out, lse = attention(Q, K, V, scale=1)
    dq, dk, dv = schedule(
        DOUT, Q, K, V, out, lse, scale=1, block_q=2, block_k=2
    )
    assert_three_decimals(dq, DQ)
    assert_three_decimals(dk, DK)
    assert_three_decimals(dv, DV)


def after_key_tile(*key_tiles):
    """Return the state of query tile 0 (rows 0, 1) after these key tiles."""
    state = TileState.empty((2,), 4)
    for tile in key_tiles:
        keys = slice(2 * tile, 2 * tile + 2)
        state = state.update(scores_of(Q[:2], K[keys], 1), V[keys])
    return state


def test_trace_after_key_tile_0():
    state = after_key_tile(0)
    assert_arrays_equal(state.m, [1, 1], "state.m")
    assert_three_decimals(state.l, [1.368, 1.368])
    assert_three_decimals(state.acc[0], [2.839, 4.207, 5.575, 6.943])
    assert_three_decimals(state.acc[1], [5.368, 6.736, 8.104, 9.472])


def test_trace_after_key_tile_1():
    state = after_key_tile(0, 1)
    assert_arrays_equal(state.m, [2, 2], "state.m")
    assert_three_decimals(state.l, [1.639, 1.639])
    assert_three_decimals(state.acc[0], [11.804, 13.442, 15.081, 16.720])
    assert_three_decimals(state.acc[1], [16.193, 17.831, 19.470, 21.108])
    out, _ = state.finalize()
    assert_three_decimals(out, expected_out()[:2])


def test_trace_is_the_documents_to_its_own_rounding():
    # Two decimals of numbers that were rounded to three on the way.
    state = after_key_tile(0, 1)
    assert_allclose(state.l[0], 1.638, "state.l[0]", rtol=1e-07, atol=0.001)
    document = [11.81, 13.44, 15.08, 16.71]
    assert_allclose(
        state.acc[0], document, "state.acc[0]", rtol=1e-07, atol=0.01
    )


def test_one_step_of_gradient_descent():
    # With X = I, W_Q is Q and dW_Q = X^T dQ is dQ; so for K and V.
    w_q, w_k, w_v = (
        w - 0.1 * d
        for w, d in zip(
            (Q, K, V), (steps().dq, steps().dk, steps().dv), strict=True
        )
    )
    assert_three_decimals(w_q[0], [1.119, -0.119, 0.562, -0.191])
    assert_three_decimals(w_k[0], [2.299, 0, 0.557, 0])
    assert_three_decimals(w_v[:, 0], [0.941, 4.978, 8.902, 12.978])
    assert_allclose(
        w_v - w_v[:, :1],
        V - V[:, :1],
        "w_v - w_v[:, :1]",
        rtol=1e-07,
        atol=1e-14,
    )
