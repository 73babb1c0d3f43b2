"""What NaN does to NumPy calls, known without the reference's sums."""

from unittest import mock

import numpy as np
import pytest

import cuflash
from cuflash.backends.numpy import seen as numpy_seen
from helpers.compare import assert_all, assert_same_nonfinite
from helpers.cpu_calls import BATCH, CALLS, HEADS, arrays, call, counted
from helpers.flagged import by_reference

TOKENS, BLOCK = 40, 16
EDGES = [0, BLOCK - 1, BLOCK, TOKENS - 1]
rng = np.random.default_rng(1)
PAIRS = BATCH, HEADS, TOKENS, TOKENS
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "mask": {"mask": rng.random(PAIRS) < 0.7, "softcap": 5.0},
    "bias": {
        "bias": rng.standard_normal(PAIRS, np.float32),
        "window": (9, 2),
        "sink": np.ones(HEADS, np.float32),
    },
    "row": {
        "bias": rng.standard_normal((1, 1, 1, TOKENS), np.float32),
        "mask": rng.random((BATCH, 1, 1, TOKENS)) < 0.7,
        "dropout": 0.2,
        "seed": 3,
    },
}
OPTIONS["mask"]["mask"][:, :, BLOCK - 1] = False  # a row that sees nothing
each_call = pytest.mark.parametrize("name", CALLS)
each_options = pytest.mark.parametrize("options", OPTIONS)


@pytest.fixture(autouse=True)
def small_tiles():
    with mock.patch.object(numpy_seen, "BLOCK_Q", BLOCK):
        yield


def few():
    """Return `arrays` of `TOKENS`; batch elements of two kinds."""
    x = {name: array[:, :TOKENS].copy() for name, array in arrays().items()}
    x["q"][1] *= 30
    return x


def spoil(x, *numbers):
    """Write numbers into q, k, v and dout, at first and last rows of tiles.

    Each where it meets none of the others.
    """
    for number, at in zip(np.resize(numbers, 4), EDGES, strict=True):
        x["q"][1, at, 0, 3] = x["dout"][1, at, 2, 5] = number
    for number, at in zip(np.resize(numbers, 2), EDGES[2:], strict=True):
        x["k"][0, at, 0, 3] = x["v"][0, at, 1, 5] = number
    return x


@each_call
@each_options
def test_nan_costs_no_row_and_no_bit(name, options):
    """Of what the reference leaves finite."""
    given = OPTIONS[options]
    x, zeros = spoil(few(), np.nan), spoil(few(), 0)
    assert counted(name, x, **given) == []
    with by_reference():
        wanted = call(name, x, **given)
    finite = call(name, zeros, **given)
    for got, want, ours in zip(
        call(name, x, **given), wanted, finite, strict=True
    ):
        assert_all(got, np.where(np.isnan(want), want, ours), name, options)


@each_call
@each_options
def test_infinities_beside_nan(name, options):
    """Where they meet: a score of inf and of NaN, sums of both."""
    given = dict(OPTIONS[options])
    x = spoil(few(), np.nan, np.inf, -np.inf)
    x["v"][0, BLOCK, 1, 6] = np.inf  # beside a NaN in the same vector
    if "bias" in given:
        given["bias"] = given["bias"].copy()
        given["bias"][-1, -1, -1, [0, 16, 39]] = np.nan, np.inf, -np.inf
    with by_reference():
        wanted = call(name, x, **given)
    for got, want in zip(call(name, x, **given), wanted, strict=True):
        assert_same_nonfinite(got, want, name, options)


@pytest.mark.parametrize("array", ["q", "k", "v", "out", "lse"])
@pytest.mark.parametrize("name", ["backward", "double_backward"])
def test_gradients_of_results_that_are_not_the_inputs(name, array):
    """NaN in one of what forward read and returned, not in the others."""
    x = few()
    out, lse = call("forward", x)
    x |= {"out": out, "lse": lse}
    x[array][1, 1, 1] = np.nan
    given = [x[y] for y in ("dout", "q", "k", "v", "out", "lse")]
    if name == "double_backward":
        given = [x[f"{y}_dot"] for y in "qkv"] + given
    with by_reference():
        wanted = getattr(cuflash, name)(*given, causal=True)
    found = getattr(cuflash, name)(*given, causal=True)
    for got, want in zip(found, wanted, strict=True):
        assert_same_nonfinite(got, want, name, array)
