"""What is known of the reals of a graph: expressions/bounds.py."""

import numpy as np
from hypothesis import given

from cuflash.expressions import bounds, derivative, nodes, text
from cuflash.expressions.evaluate import ModArrays, Values
from cuflash.expressions.trace import Given, record
from cuflash.request import softcap
from expression_strategies import scores
from helpers.compare import assert_all
from helpers.expression_calls import Pairs, given_of, mod_arrays, recorded

LARGE = np.finfo(np.float32).max / 16
SCORES = np.array([0, -0.0, 1e-45, 1, -1, 20, -1e9, 1e19, -1e30, LARGE])


def reals(function):
    """Return the reals of a score's graph and of its slopes."""
    score = record(lambda s, b, h, i, j: function(s, i - j), "score_mod",
                   Given())[0]  # fmt: skip
    first = derivative.slope(score)
    graphs = score, first, derivative.slope(first)
    return [x for x in nodes.in_order(graphs) if x.kind == "real"]


def divisors(function):
    """Return the divisors that depend on a pair."""
    found = [x for x in reals(function) if x.op == "divide"]
    return {x.args[1] for x in found if not x.args[1].is_constant}


def test_divisors():
    (square,) = divisors(lambda s, d: s / (1 + s * s / 100))
    assert bounds.is_far_from_zero(square)
    assert not bounds.is_finite(square)  # s * s may be infinite
    (apart,) = divisors(lambda s, d: s / (1 + abs(d) / 64))
    assert bounds.is_moderate(apart)
    (below,) = divisors(lambda s, d: s / (d * 1.0 + 1))
    assert not bounds.is_far_from_zero(below)
    (small,) = divisors(lambda s, d: s / (1e-40 * (abs(d) + 1.0)))
    assert not bounds.is_far_from_zero(small)


def test_factors_that_are_finite_need_no_test():
    for function in (
        lambda s, d: s / (1 + s * s / 100),
        lambda s, d: 20 * np.tanh(s / 20),
        lambda s, d: s * np.exp(-s * s),
    ):
        assert all(x.op != "product_if" for x in reals(function))
    root = reals(lambda s, d: s + s * np.sqrt(abs(s)))
    assert any(x.op == "product_if" for x in root)


def test_a_small_tanh_is_the_softcaps():
    assert text.SMALL_SQUARE == softcap.POLY4_MOST


@given(scores())
def test_bounds_hold(function):
    """Also of slopes, where scores are 0 or large, in float32."""
    values = mod_arrays(3)
    _, *own = given_of(values)
    root = recorded(function, values)
    graphs = nodes.in_order([root, derivative.slope(root)])
    found = [x for x in graphs if x.kind == "real" and not x.is_constant]
    pairs = Pairs.drawn(3, len(SCORES), 9, np.float32)
    pairs.score[:] = np.float32(SCORES)[:, None]
    with np.errstate(all="ignore"):
        computed = Values(
            pairs.leaves(), ModArrays(*own), np.dtype(np.float32)
        ).of(*found)
    for node, value in zip(found, computed, strict=True):
        if bounds.is_finite(node):
            assert_all(np.isfinite(value), True, repr(node))
        if bounds.is_far_from_zero(node):
            far = np.abs(value) >= 2.0**-101
            assert_all(far, True, repr(node))


def long_score(s, d):
    for i in range(40):
        s = s + (i + 0.125) / (1 + s * s)
    return s


def test_a_node_is_bounded_once(monkeypatch):
    """Slopes of long scores ask about each of their nodes."""
    asked, of = [], bounds._of
    monkeypatch.setattr(bounds, "_KNOWN", {})
    monkeypatch.setattr(
        bounds,
        "_of",
        lambda node, known: asked.append(node) or of(node, known),
    )
    assert all(map(bounds.is_finite, reals(long_score))) is False
    # In each real type, of any score and of 0.
    assert len(asked) <= 2 * len(bounds._MOST) * len(set(asked))
