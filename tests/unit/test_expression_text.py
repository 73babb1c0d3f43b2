"""What is written for a score and a mask."""

import re

import numpy as np

from cuflash.expressions import text, trace


def written(score_mod, dmods, **arrays):
    given = trace.Given(tuple(arrays.items()))
    score, _ = trace.record(score_mod, "score_mod", given)
    return text.text(score, None, tuple(arrays.values()), dmods)


def test_gradients_of_an_array_by_head():
    """No pair reads it, but each pair adds to its gradient."""

    def scaled(score, b, h, q_idx, kv_idx, *, factor):
        return score * factor[h]

    factor = trace.ArrayKind("float32", ndim=1)
    with_gradient = written(scaled, (0,), factor=factor)
    assert "::of(*args, 0)" in with_gradient
    assert "const Arguments* args = nullptr;" in with_gradient
    without = written(scaled, (), factor=factor)
    assert "Arguments* args" not in without


def test_what_pairs_share_is_summed_first():
    table = trace.ArrayKind("float32", ndim=2, unit=(1,))

    def sums_of(index):
        def added(score, b, h, q_idx, kv_idx, *, table):
            return score + table[h, index(q_idx, kv_idx)]

        found = written(added, (0,), table=table)
        kinds = ("Head", "Query", "Key", "Distance")
        return [x for x in kinds if f"ex::{x}Sum" in found]

    assert sums_of(lambda q, k: 3) == ["Head"]
    assert sums_of(lambda q, k: q // 2) == ["Query"]
    assert sums_of(lambda q, k: -k) == ["Key"]
    assert sums_of(lambda q, k: abs(2 * (q - k) + 1) % 64) == ["Distance"]
    assert sums_of(lambda q, k: 7 + q - (k - 3)) == ["Distance"]
    assert sums_of(lambda q, k: q + k) == []
    assert sums_of(lambda q, k: (q - k) * k) == []
    assert sums_of(lambda q, k: 2 * q - k) == []


def test_what_pairs_of_a_distance_share():
    table = trace.ArrayKind("float32", ndim=2, unit=(1,))

    def shared_by(function):
        given = trace.Given((("table", table),))
        score, _ = trace.record(function, "score_mod", given)
        found = text.text(score, None, (table,), short=True)
        members = found.partition("struct OfDistance {")[2].partition("}")[0]
        return members.split()[::2]

    assert shared_by(
        lambda s, b, h, q, k, *, table: s + table[h, q - k + 5]
    ) == ["Real"]
    assert shared_by(
        lambda s, b, h, q, k, *, table: s - table[h, 0] * abs(q - k)
    ) == ["Real"]
    assert shared_by(
        lambda s, b, h, q, k, *, table: s * (q > k) + table[h, k] * (q - k)
    ) == ["Real"]
    assert not shared_by(
        lambda s, b, h, q, k, *, table: s + table[h, q + k] + table[h, k]
    )


def test_quotients_that_choose_an_element_are_exact():
    """In 16 bits too: 41 / 41 by an inverse is less than 1."""
    table = trace.ArrayKind("float32", ndim=1, unit=(0,))

    def bucketed(s, b, h, q, k, *, table):
        bucket = np.floor((q - k) / 41.0).astype(int)
        late = np.where(k / (q + 1.0) > 0.5, 1.0, 0.0)
        return s / (1.0 + abs(q - k)) + table[bucket] + late + s / 41.0

    found = re.findall("divide(.*?>)", written(bucketed, (), table=table))
    kinds = ("_constant<false>", "<false>", "_constant<FAST>")
    assert {*kinds, "<FAST, ex::MODERATE>"} == {*found}


def test_quotients_that_decide_whether_there_is_a_value_are_exact():
    """In 16 bits too, and of a score: the root of 1 - 41 / 41."""

    def of(f):
        found = written(lambda s, b, h, q, k: f(s, q, k), ())
        return {*re.findall("divide(.*?>)", found)}

    for f in (np.sqrt, np.log, np.log1p, np.isnan, lambda x: x**0.5):
        assert of(lambda s, q, k, f=f: s + 1.0 * f(q / (k + 1))) == {"<false>"}
    assert "<false>" in of(lambda s, q, k: np.sqrt(1 - s / (1 + abs(s))))
    fast = {"<FAST, ex::FAR>"}
    assert of(lambda s, q, k: s / np.sqrt(1.0 + s * s)) == fast
