"""Weights, sums, maxima and entropies: matrices, and central differences."""

import numpy as np
import pytest
from hypothesis import given

from cuflash.reference import readouts
from cuflash.reference.attention import attention
from cuflash.reference.options import Options, Tiles
from helpers.compare import assert_all, assert_allclose, assert_arrays_equal
from helpers.reference_cases import (
    EPS,
    ReferenceCase,
    assert_close,
    bounds,
)
from reference_strategies import optional_cases

CALLS = {
    "weights": (readouts.weights, readouts.weights_backward, {}),
    "sums": (readouts.weight_sums, readouts.weight_sums_backward, {}),
    "maxima": (
        readouts.weight_sums,
        readouts.weight_sums_backward,
        {"reduce": "max"},
    ),
    "entropy": (readouts.entropy, readouts.entropy_backward, {}),
}
each_call = pytest.mark.parametrize("name", CALLS)


def matrix(case):
    """Return P, q, k and lse: P is attention to unit vectors."""
    q, k, _, _ = case.arrays()
    options = {**case.meaning(), "dropout": None}
    eye = np.broadcast_to(
        np.eye(case.seqlen_k), (*case.lead, case.seqlen_k, case.seqlen_k)
    )
    p, lse = attention(q, k, eye, **options)
    return p, q, k, lse


def arguments(case, name):
    """Return what a call chooses: some rows twice, some from the end."""
    rng = np.random.default_rng(case.seed + 6)
    n, m = case.seqlen_q, case.seqlen_k
    if name == "entropy":
        return case.blocks()
    if name == "weights":
        rows = rng.integers(-n, n, 4) if n else []
        return {"rows": rows, "columns": rng.integers(-m, m, 5) if m else []}
    return {
        "row_weights": rng.standard_normal(n),
        "chosen": rng.random(n) < 0.7,
        **case.blocks(),
    }


def call(case, name, q, k, lse):
    function, _, more = CALLS[name]
    options = {**case.meaning(), "dropout": None}
    return function(q, k, lse, **arguments(case, name), **more, **options)


def of_matrix(p, case, name):
    """Return a readout by its definition."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "entropy":
            return 0 - np.where(p > 0, p * np.log(p), 0).sum(axis=-1)
    asked = arguments(case, name)
    if name == "weights":
        rows, columns = (np.asarray(asked[x], int) for x in asked
                         if x in ("rows", "columns"))  # fmt: skip
        return p[..., rows, :][..., columns]
    terms = asked["row_weights"][:, None] * p
    if name == "sums":
        return terms[..., asked["chosen"], :].sum(axis=-2)
    see = seen(case) & asked["chosen"][:, None]
    found = np.where(see, terms, -np.inf).max(axis=-2, initial=-np.inf)
    return np.where(see.any(axis=-2), found, 0)


def seen(case):
    """Return which query sees which key, of the case's shape."""
    options = {**case.meaning(), "dropout": None}
    scale = options.pop("scale")
    pairs = Tiles(case.seqlen_q, case.seqlen_k, scale, Options(**options))
    shape = (*case.lead, case.seqlen_q, case.seqlen_k)
    visible = pairs.visible(pairs.whole())
    return np.broadcast_to(True if visible is None else visible, shape)


def bound_of(case, name):
    """Return the bound of a readout by that of out = P v for v of 1.

    That is twice the relative error of a weight. A sum of n rows has n such
    errors, times the largest of n standard normals, below 6. -P log P has
    that of P, |log P| times, and that of log P, P times; over a row, P adds
    up to 1 and -P log P to at most log n, in either of the two computations.
    """
    q, k, v, dout = case.arrays()
    rounded = bounds(case, q, k, np.ones_like(v), dout)
    one, rows = rounded.out, max(case.seqlen_q, 1)
    of_logs = 2 * (np.log(case.seqlen_k + 1) + 2) * (one + rounded.lse)
    return {
        "weights": one,
        "sums": 6 * rows * one,
        "maxima": 6 * one,
        "entropy": of_logs,
    }[name]


@each_call
@given(case=optional_cases())
def test_readouts_are_those_of_the_matrix(name, case):
    p, *given = matrix(case)
    got = call(case, name, *given)
    assert_close(got, of_matrix(p, case, name), bound_of(case, name))


def cotangent(case, name, readout):
    """Return the gradient of a loss with respect to a readout.

    Of maxima it is 0 where another row's number is near the largest: the
    step of a difference may make that the largest.
    """
    rng = np.random.default_rng(case.seed + 7)
    found = rng.standard_normal(readout.shape)
    if name == "maxima" and case.seqlen_q > 1:
        asked = arguments(case, name)
        see = seen(case) & asked["chosen"][:, None]
        p = np.where(see, asked["row_weights"][:, None] * matrix(case)[0], -9)
        second, largest = np.moveaxis(np.sort(p, axis=-2), -2, 0)[-2:]
        found[largest - second < 0.01] = 0
    return found


@each_call
@pytest.mark.parametrize("moved", ["q", "k", "lse"])
@given(case=optional_cases())
def test_gradients_are_central_differences(name, moved, case):
    """|D(2h) - D(h)| is three times D(h)'s error, but for higher orders."""
    given_ = dict(zip(("q", "k", "lse"), matrix(case)[1:], strict=True))
    readout = call(case, name, **given_)
    of_loss = cotangent(case, name, readout)
    backward, more = CALLS[name][1:]
    options = {**case.meaning(), "dropout": None, **more}
    found = backward(of_loss, **given_, **arguments(case, name), **options)
    rng = np.random.default_rng(case.seed + 8)
    direction = rng.standard_normal(given_[moved].shape)
    direction /= max(np.linalg.norm(direction), 1)

    def slope(h):
        ahead, behind = (
            call(case, name, **{**given_, moved: given_[moved] + x})
            for x in (h * direction, -h * direction)
        )
        return (of_loss * (ahead - behind)).sum() / (2 * h)

    h = 1e-4
    once, twice = slope(h), slope(2 * h)
    rounding = bound_of(case, name) + of_loss.size * EPS
    atol = abs(twice - once) + rounding * abs(of_loss).sum() * 10 / h
    got = (getattr(found, f"d{moved}") * direction).sum()
    assert_allclose(got, once, "got", atol=atol)


@given(case=optional_cases())
def test_row_weights_have_the_gradient_of_a_linear_function(case):
    _, q, k, lse = matrix(case)
    rng = np.random.default_rng(case.seed)
    of_loss = rng.standard_normal((*case.lead, case.seqlen_k))
    asked = arguments(case, "sums")
    options = {**asked, **case.meaning(), "dropout": None}
    found = readouts.weight_sums_backward(of_loss, q, k, lse, **options)
    loss = (of_loss * readouts.weight_sums(q, k, lse, **options)).sum()
    bound = bound_of(case, "sums") * (abs(of_loss).sum() + 1)
    got = (found.drow_weights * asked["row_weights"]).sum()
    assert_allclose(got, loss, "got", atol=2 * bound + case.seqlen_q * EPS)


# What rounding does not decide ----------------------------------------------


def plain(**changes):
    case = ReferenceCase((2,), 5, 3, **changes)
    return case, matrix(case)[1:]


def test_rows_and_keys_that_see_nothing_are_0():
    case, given_ = plain(causal=True)  # two rows see no key
    found = readouts.entropy(*given_, causal=True, heads_first=True)
    assert_all(found[:, :2], 0, "entropy")
    for reduce in ("sum", "max"):
        sums = readouts.weight_sums(
            *given_, causal=True, heads_first=True, reduce=reduce,
            chosen=np.arange(5) < 2,
        )  # fmt: skip
        assert_all(sums, 0, reduce)


def test_a_sink_takes_weight():
    q, k = np.zeros((1, 2)), np.zeros((3, 2))
    sink = np.array(np.log(5.0))  # of three keys and it, 5 / 8
    lse = np.array([np.log(8.0)])
    found = readouts.weights(q, k, lse, sink=sink)
    assert_allclose(found, np.full((1, 3), 1 / 8), "weights", rtol=1e-15)


def test_weights_that_underflow_add_nothing_to_the_entropy():
    q, k = np.array([[1.0]]), np.array([[0.0], [-1e4], [-1e308]])
    found = readouts.entropy(q, k, np.zeros(1), scale=10)
    assert_arrays_equal(found, np.zeros(1), "entropy")


def test_equal_rows_have_their_maximum_in_the_first():
    q, k, lse = np.zeros((4, 2)), np.zeros((2, 2)), np.zeros(4)
    found = readouts.maxima(
        q, k, lse, chosen=np.arange(4) > 0, block_q=1, block_k=1
    )
    assert_arrays_equal(found.row, [1, 1], "row")


def test_a_nan_is_the_largest():
    q, k, lse = np.zeros((3, 1)), np.zeros((1, 1)), np.zeros(3)
    found = readouts.maxima(q, k, lse, row_weights=[1, np.nan, 2], block_q=1)
    assert_arrays_equal(found.row, [1], "row")
