"""Functions of expressions that are made of others: values and slopes."""

import numpy as np
import pytest

import cuflash
from cuflash.reference.attention import attention
from helpers.compare import assert_allclose

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 7, 8))
A, B = 3 * RNG.standard_normal((2, 7))
FUNCTIONS = {
    "fmod": np.fmod,
    "logaddexp": np.logaddexp,
    "arctan": lambda a, b: np.arctan(a) * b,
}


def given(name):
    def score_mod(s, b, h, i, j, *, x, y):
        return s + FUNCTIONS[name](x[i], y[j])

    return {"score_mod": score_mod, "mod_arrays": {"x": A, "y": B}}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_are_those_of_the_reference(name):
    """Which calls NumPy's functions, and has slopes of its own."""
    out, lse = cuflash.forward(Q, K, K, return_lse=True, **given(name))
    want, _ = attention(Q, K, K, **given(name))
    assert_allclose(out, want, name, rtol=0, atol=1e-13)
    *_, dmod = cuflash.backward(
        out, Q, K, K, out, lse, return_dmod=("x", "y"), **given(name)
    )
    h, dots = 1e-6, RNG.standard_normal((2, 7))

    def loss(step):
        x, y = A + step * dots[0], B + step * dots[1]
        moved = given(name) | {"mod_arrays": {"x": x, "y": y}}
        return (out * cuflash.forward(Q, K, K, **moved)).sum()

    slope = (dmod["x"] * dots[0] + dmod["y"] * dots[1]).sum()
    # h^2 of the third derivative; numbers below 2^6 rounded, by 2h.
    assert_allclose(slope, (loss(h) - loss(-h)) / (2 * h), name, atol=1e-7)


@pytest.mark.parametrize("x", [np.inf, -np.inf, 0.0, 1e30])
def test_logaddexp_of_equal_numbers(x):
    arrays = {"x": np.full(7, x), "y": np.full(7, x)}
    largest = cuflash.forward(
        0 * Q, K, K, return_max_score=True,
        score_mod=lambda s, b, h, i, j, *, x, y: np.logaddexp(x[i], y[j]),
        mod_arrays=arrays,
    )[1]  # fmt: skip
    assert_allclose(largest, np.logaddexp(x, x), "score", rtol=1e-15, atol=0)


def test_fmod_of_ints_has_the_sign_of_the_first():
    i, j = np.ogrid[:7, :7]
    mask = np.fmod(i - j, 3) == -1
    got, want = (
        cuflash.forward(Q, K, K, return_lse=True, **x)[1]
        for x in (
            {"mask_mod": lambda b, h, i, j: np.fmod(i - j, 3) == -1},
            {"mask": mask},
        )
    )
    assert_allclose(got, want, "lse", rtol=0, atol=1e-13)
