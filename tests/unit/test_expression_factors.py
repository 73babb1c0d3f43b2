"""Derivatives have one constant factor where their terms have several."""

import numpy as np

from cuflash.expressions import derivative, nodes
from cuflash.expressions.trace import Given, record


def slopes(function):
    score = record(lambda s, b, h, i, j: function(s), "score_mod", Given())[0]
    first = derivative.slope(score)
    return first, derivative.slope(first)


def factors(node):
    """Return the constants that multiply something."""
    every = (x.args for x in nodes.in_order([node]) if x.op == "multiply")
    return sorted(y.value for args in every for y in args if y.is_constant)


def test_a_softcap_has_the_slope_of_tanh():
    first, second = slopes(lambda s: 20 * np.tanh(s / 20))
    assert [x.op for x in first.args] == ["constant", "multiply"]
    assert factors(first) == [] and factors(second) == [-2.0 / 20]


def test_equal_terms_are_one():
    first, second = slopes(lambda s: 3 * (-s * s) * 0.5)
    assert factors(first) == [-3.0] and second.value == -3.0


def test_factors_whose_product_is_no_number_stay():
    """Beside that of s in the exponent."""
    first, _ = slopes(lambda s: 1e-9 * np.exp(1e9 * s))
    assert factors(first) == [1e9]
    first, _ = slopes(lambda s: 1e30 * np.exp(1e30 * s))
    assert factors(first) == [1e30] * 3
