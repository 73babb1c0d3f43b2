"""Gradients of `mod_arrays` in readouts of NumPy arrays."""

import numpy as np
import pytest

import cuflash
from cuflash.reference import readouts
from helpers.compare import assert_allclose, assert_finite

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 19, 4, 8)), RNG.standard_normal((2, 23, 2, 8))
SHAPES = {"table": (4, 41), "rate": (4,), "key": (2, 23)}
ARRAYS = {name: RNG.standard_normal(x) for name, x in SHAPES.items()}
NAMES = tuple(ARRAYS)


def modified(score, b, h, i, j, *, table, rate, key):
    return score * rate[h] + table[h, i - j + 22] * np.tanh(score) + key[b, j]


OPTIONS = {"score_mod": modified, "mask_mod": lambda b, h, i, j: i + 6 >= j}
LSE = cuflash.forward(
    Q, K, K, mod_arrays=ARRAYS, return_lse=True, **OPTIONS
)[1]  # fmt: skip
CHOSEN = {"queries": [1, 5, 5, -1], "keys": [0, 3, 18, 3], "heads": [0, 2, 2]}
CALLS = {
    "weights": (cuflash.weights, cuflash.weights_backward, CHOSEN),
    "sums": (
        cuflash.weight_sums,
        cuflash.weight_sums_backward,
        {"queries": slice(3, 17), "row_weights": RNG.standard_normal((4, 19))},
    ),
    "maxima": (
        cuflash.weight_sums,
        cuflash.weight_sums_backward,
        {"reduce": "max"},
    ),
    "entropy": (cuflash.entropy, cuflash.entropy_backward, {}),
}
each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_they_are_central_differences(name):
    """lse is an input of its own, which the arrays do not move."""
    call, backward, asked = CALLS[name]
    asked = OPTIONS | asked
    dots = {x: RNG.standard_normal(y.shape) for x, y in ARRAYS.items()}

    def at(h):
        moved = {x: y + h * dots[x] for x, y in ARRAYS.items()}
        return call(Q, K, LSE, mod_arrays=moved, **asked)

    d, h = RNG.standard_normal(at(0).shape), 1e-5
    *_, dmod = backward(
        d, Q, K, LSE, mod_arrays=ARRAYS, return_dmod=NAMES, **asked
    )
    got = sum((dmod[x] * dots[x]).sum() for x in NAMES)
    # The error of a difference: h^2 times a third derivative, and that of
    # numbers below 1e3, 1e-13, by 2h.
    want = ((at(h) - at(-h)) * d).sum() / (2 * h)
    assert_allclose(got, want, name, rtol=0, atol=1e-6)


def test_names_choose_and_dtypes_are_the_arrays():
    arrays = ARRAYS | {"rate": ARRAYS["rate"].astype(np.float16)}
    *_, dmod = cuflash.entropy_backward(
        LSE, Q, K, LSE, mod_arrays=arrays, return_dmod=("rate",), **OPTIONS
    )
    assert {x: y.dtype.name for x, y in dmod.items()} == {"rate": "float16"}


@each_call
def test_they_come_last(name):
    call, backward, asked = CALLS[name]
    asked, given = OPTIONS | asked, {"mod_arrays": ARRAYS}
    d = call(Q, K, LSE, **given, **asked)
    if name == "sums":
        asked["return_drow_weights"] = True
    without = backward(d, Q, K, LSE, **given, **asked)
    found = backward(d, Q, K, LSE, return_dmod=NAMES, **given, **asked)
    assert len(found) == len(without) + 1 and {*found[-1]} == {*NAMES}
    for x, y in zip(found[:-1], without, strict=True):
        assert_allclose(x, y, name, rtol=1e-14, atol=0)


def test_rows_that_do_not_count_add_nothing():
    q, arrays = Q.copy(), {**ARRAYS, "key": ARRAYS["key"].copy()}
    q[:, 7] = np.nan
    arrays["key"][:, 22] = np.inf  # queries before 16 do not see it
    found = cuflash.weight_sums_backward(
        np.ones((2, 4, 23)), q, K, LSE, queries=[1, 2, 15],
        mod_arrays=arrays, return_dmod=NAMES, **OPTIONS,
    )  # fmt: skip
    for name, x in found[-1].items():
        assert_finite(x, name)


def test_of_the_reference():
    """One head: dX by hand, where f_a is 1 for a key's number."""
    q, k = Q[0, :, 0], K[0, :, 0]
    key = ARRAYS["key"][0]
    lse, d = LSE[0, 0], RNG.standard_normal(19)
    score_mod = lambda s, b, h, i, j, *, key: s + key[j]  # noqa: E731
    found = readouts.entropy_backward(
        d, q, k, lse, score_mod=score_mod, mod_arrays={"key": key},
        return_dmod=("key",),
    )  # fmt: skip
    x = q @ k.T / np.sqrt(8) + key - lse[:, None]
    dx = np.exp(x) * d[:, None] * (-x - 1)
    assert_allclose(found.dmod["key"], dx.sum(0), "key", rtol=1e-12, atol=0)
