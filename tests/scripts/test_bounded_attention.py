"""scripts/bounded_attention.py agrees with docs/guide/accuracy.md."""

import numpy as np
import pytest

import bounded_attention
from cuflash.check.bounds import ARITHMETIC
from helpers import bounds
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_elements,
    assert_finite,
)

SCALE = 0.3


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Use several chunks, the last one partial."""
    monkeypatch.setattr(bounded_attention, "ROWS", 16)


def arrays(seqlen_q, seqlen_k, d=8, dv=5, heads=1):
    rng = np.random.default_rng(0)
    sizes = (seqlen_q, d), (seqlen_k, d), (seqlen_k, dv), (seqlen_q, dv)
    return [2 * rng.standard_normal((1, heads, *x)) for x in sizes]


def attend(q, k, v, dout, kind="float64", causal=True, **options):
    return bounded_attention.attend(
        *(x[0, 0] for x in (q, k, v)), dout[0, 0],
        scale=SCALE, causal=causal, kind=kind, xp=np, **options,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ARITHMETIC)
def test_results_and_bounds_are_those_of_the_tests(kind, causal):
    q, k, v, dout = arrays(45, 61)
    x = bounds.exact(dout, q, k, v, scale=SCALE, causal=causal)
    results, allowed = attend(q, k, v, dout, kind, causal)
    two = [bounds.bounds(x, ARITHMETIC[y]) for y in (kind, "float64")]
    for got, want in zip(results, bounds.results(x), strict=True):
        assert_allclose(got, want[0, 0], "got", rtol=1e-12, atol=1e-13)
    for got, *want in zip(allowed, *two, strict=True):
        assert_allclose(got, sum(want)[0, 0], "got", rtol=1e-12)


def test_rows_that_see_no_key_have_no_error():
    results, allowed = attend(*arrays(20, 13))
    assert_all(results.lse[:7], -np.inf, "results.lse[:7]")
    assert_finite(results.lse[7:], "results.lse[7:]")
    for x in (results.out, results.dq, allowed.out, allowed.dq):
        assert_all(x[:7], 0, "x[:7]")
        assert_all(x[7:] != 0, True, "x[7:] != 0")
    for x in allowed:
        assert_finite(x, "x")


def test_a_forward_pass_alone():
    q, k, v, dout = arrays(20, 30)
    options = {"scale": SCALE, "causal": False, "kind": "tf32x3", "xp": np}
    some = bounded_attention.attend(*(x[0, 0] for x in (q, k, v)), **options)
    both = attend(q, k, v, dout, "tf32x3", causal=False)
    for short, long in zip(some, both, strict=True):
        assert short.dq is short.dk is short.dv is None
        assert_elements(short.out, long.out, "short.out")
        assert_elements(short.lse, long.lse, "short.lse")


def test_a_group_of_heads_adds_up_more_queries():
    inputs = arrays(20, 30)
    (_, one), (_, three) = (attend(*inputs, group=n) for n in (1, 3))
    assert_all(three.dk > one.dk, True, "three.dk > one.dk")
    assert_all(three.dv > one.dv, True, "three.dv > one.dv")
    assert_elements(three.dq, one.dq, "three.dq")
