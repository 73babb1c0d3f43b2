"""Rotary position embedding: the properties that define it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.rotary import apply_rotary, tables
from helpers.compare import assert_arrays_equal
from helpers.reference_cases import EPS, assert_close

seeds = st.integers(0, 2**32 - 1)
layouts = st.booleans()
POSITIONS = 50


def drawn(seed, lead=(2, 5), head_dim=10, rotary_dim=6):
    """Return x, cos, sin and random positions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*lead, 3, head_dim))
    positions = rng.integers(0, POSITIONS, lead)
    return x, *tables(POSITIONS, rotary_dim), positions


@given(seeds, layouts)
def test_a_rotation_keeps_norms(seed, interleaved):
    x, cos, sin, positions = drawn(seed)
    got = apply_rotary(x, cos, sin, positions, interleaved)
    norms = np.linalg.norm(x, axis=-1)
    # Two products and a sum of rounded cos and sin: 4 EPS; the norms 10.
    bound = 20 * EPS * norms.max()
    assert_close(np.linalg.norm(got, axis=-1), norms, bound)


@given(seeds, layouts)
def test_the_inverse_undoes_it(seed, interleaved):
    x, *call = drawn(seed)
    there = apply_rotary(x, *call, interleaved)
    back = apply_rotary(there, *call, interleaved, inverse=True)
    # 3 EPS of |a| + |b| each way, and cos^2 + sin^2 is within 4 EPS of 1.
    assert_close(back, x, 20 * EPS * abs(x).max())


@given(seeds, layouts)
def test_the_inverse_is_the_gradient(seed, interleaved):
    """The transpose: dot(y, R x) = dot(R^T y, x)."""
    x, *call = drawn(seed)
    y = np.random.default_rng(seed + 1).standard_normal(x.shape)
    rotated = apply_rotary(x, *call, interleaved)
    gradient = apply_rotary(y, *call, interleaved, inverse=True)
    bound = 2 * (x.size + 8) * EPS * 2 * (abs(x).max() * abs(y).max() * x.size)
    assert_close((y * rotated).sum(), (gradient * x).sum(), bound)


@given(seeds, layouts, st.integers(0, 20), st.integers(0, 20))
def test_a_score_depends_on_the_distance_only(seed, interleaved, m, n):
    q, cos, sin, _ = drawn(seed, (1,), 8, 8)
    k = np.random.default_rng(seed + 1).standard_normal(q.shape)

    def score(m, n):
        turned = (apply_rotary(x, cos, sin, [at], interleaved)
                  for x, at in ((q, m), (k, n)))  # fmt: skip
        return np.prod(np.array([*turned]), axis=0).sum(axis=-1)

    # Angles up to POSITIONS are off by EPS of themselves.
    size = 2 * (abs(q).max() * abs(k).max() * 8)
    bound = 2 * (2 * POSITIONS + 8 + 8) * EPS * size
    assert_close(score(m + 25, n + 25), score(m, n), bound)


@given(seeds)
def test_the_layouts_differ_by_a_permutation(seed):
    x, *call = drawn(seed, rotary_dim=10)
    order = np.arange(10).reshape(2, 5).T.ravel()  # 0 5 1 6 ...
    halves = apply_rotary(x, *call)
    interleaved = apply_rotary(x[..., order], *call, interleaved=True)
    assert_arrays_equal(interleaved, halves[..., order], "interleaved")


@pytest.mark.parametrize("interleaved", [False, True])
def test_position_0_and_other_columns_stay(interleaved):
    x, cos, sin, positions = drawn(0)
    got = apply_rotary(x, cos, sin, positions, interleaved)
    assert_arrays_equal(got[..., 6:], x[..., 6:], "got[..., 6:]")
    got = apply_rotary(x, cos, sin, 0, interleaved)
    assert_arrays_equal(got, x, "got")


def test_complex_numbers_turn_alike():
    x, cos, sin, positions = drawn(0, (7,), 6, 6)
    got = apply_rotary(x, cos, sin, positions, interleaved=True)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)[
        positions, None
    ]
    bound = 4 * EPS * 2 * abs(x).max()
    assert_close(got[..., ::2], turned.real, bound)
    assert_close(got[..., 1::2], turned.imag, bound)


def test_packed_tokens_are_those_of_a_batch():
    x, cos, sin, positions = drawn(1)
    whole = apply_rotary(x, cos, sin, positions)
    packed = x.reshape(10, *x.shape[2:]), cos, sin, positions.reshape(10)
    assert_arrays_equal(apply_rotary(*packed).reshape(x.shape), whole, "x")
