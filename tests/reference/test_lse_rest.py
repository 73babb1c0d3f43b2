"""Rows masked by -1e18 in a bias: lse has lost log n, weights are 1 / n."""

import numpy as np
import pytest

from cuflash.reference import backward, lse_rest
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.double_backward import double_backward
from cuflash.reference.options import Options, Tiles
from helpers.compare import assert_allclose

EPS = np.finfo(np.float64).eps
TILES = {"block_q": 2, "block_k": 3}


def call_of(bias, **options):
    """Return dout, q, k, v, out and lse of 4 queries of zeros and 5 keys."""
    rng = np.random.default_rng(0)
    dout, k, v = (rng.standard_normal((n, 3)) for n in (4, 5, 5))
    q = np.zeros((4, 3))
    return dout, q, k, v, *attention(q, k, v, bias=bias, **options)


SCHEDULES = (
    (backward.row_by_row, {}),
    (backward.query_outer, TILES),
    (backward.key_outer, TILES),
    (backward.two_pass, TILES),
)


@pytest.mark.parametrize(("schedule", "tiles"), SCHEDULES)
def test_gradients_are_those_without_the_offset(schedule, tiles):
    """Sums of at most 5 terms of sizes below 4."""
    bias = np.repeat([[-1e18], [0.0], [1e300], [2.0**60]], 5, axis=1)
    dout, q, k, v, *states = call_of(bias)
    got = schedule(dout, q, k, v, *states, bias=bias, **tiles)
    want = attention_vjp(dout, q, k, v, bias=0 * bias)
    for a, b in zip(got, want, strict=True):
        assert_allclose(a, b, "a", atol=5 * 4 * 8 * EPS)


def test_a_sink_as_low():
    """It has the weight of a key more, in two rows of four."""
    bias = np.repeat([[-1e18], [0.0], [-1e18], [0.0]], 5, axis=1)
    dout, q, k, v, *states = call_of(bias, sink=-1e18)
    *_, dsink = backward.query_outer(
        dout, q, k, v, *states, bias=bias, sink=-1e18, **TILES
    )
    products = (dout * states[0]).sum(axis=1)
    assert_allclose(dsink, -products[::2].sum() / 6, "dsink", rtol=8 * EPS)


def test_second_gradients_are_those_without_the_offset():
    """Sums of at most 15 products of sizes below 16."""
    bias = np.full((4, 5), -1e18)
    dout, q, k, v, *states = call_of(bias)
    ddq, ddk, ddv = np.random.default_rng(1).standard_normal((3, 5, 3))
    given = ddq[:4], ddk, ddv, dout, q, k, v
    got = double_backward(*given, *states, bias=bias, **TILES)
    want = double_backward(*given, *attention(q, k, v), **TILES)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert_allclose(a, b, "a", atol=15 * 16 * 8 * EPS)


def test_an_lse_of_more_keys_has_no_rest():
    q, k, bias = np.zeros((1, 2)), np.zeros((5, 2)), np.full((1, 5), 1e6)
    lse = np.array([1e6 + np.log(10.0)])  # of these keys, it would be log 5
    pairs = Tiles(1, 5, 1.0, Options(bias=bias))
    assert lse_rest.lse_rests(lse, q, k, pairs) == 0
