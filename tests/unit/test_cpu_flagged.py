"""NumPy calls have the reference compute the rows that need it, alone."""

import numpy as np
import pytest

import cuflash
from helpers.compare import assert_all, assert_bitwise, assert_finite
from helpers.cpu_calls import (
    BATCH,
    CALLS,
    HEADS,
    TOKENS,
    arrays,
    call,
    counted,
)
from helpers.flagged import rows_counted

NAN, INF = np.float32("nan"), np.float32("inf")

each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_ordinary_calls_have_none(name):
    assert counted(name, arrays(), causal=True) == []


@each_call
def test_nan_behind_a_mask_costs_no_row(name):
    """And changes no bit: missing samples, and padding of both."""
    x = arrays()
    mask = np.ones((BATCH, 1, TOKENS, TOKENS), bool)
    mask[..., 40:90] = mask[..., -9:] = mask[:, :, -9:] = False
    results = []
    for hole in (0, NAN):
        for of_keys in ("k", "v", "k_dot", "v_dot"):
            x[of_keys][:, 40:90] = x[of_keys][:, -9:] = hole
        x["q"][:, -9:] = hole
        assert counted(name, x, mask=mask) == []
        results.append(call(name, x, mask=mask))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b, name)


@each_call
@pytest.mark.parametrize("bad", [INF, -INF, np.float32(1e6)])
def test_a_query_costs_its_own_row(name, bad):
    """Or none, where an lse of inf tells backward all."""
    x = arrays()
    x["q"][0, [7, 290], 1, 3] = bad
    known = np.isinf(bad) and "backward" in name
    assert counted(name, x) == ([] if known else [2])


def test_a_few_queries_of_each_head_cost_one_call():
    x = arrays()
    for head in range(HEADS):
        x["q"][0, 10 * head, head] = INF
    assert counted("forward", x) == [HEADS]


@pytest.mark.parametrize("name", ["forward", "jvp"])
@pytest.mark.parametrize("array", ["k", "v"])
def test_a_key_costs_the_rows_that_see_it(name, array):
    x = arrays()
    x[array][1, 250, 1] = INF
    assert counted(name, x, causal=True) == [TOKENS - 250]


@pytest.mark.parametrize("bad", [NAN, INF, np.float32(1e6)])
def test_a_bias_costs_the_rows_that_see_it(bad):
    x, bias = arrays(), np.zeros((TOKENS, TOKENS), np.float32)
    bias[5, 3] = bias[7, 3] = bad
    bias[6, 200] = bad  # causal: not seen
    assert counted("forward", x, bias=bias, causal=True) == [2]


@pytest.mark.parametrize("option", ["sink", "alibi_slopes"])
def test_an_option_of_a_head_costs_the_rows_of_its_key_head(option):
    x, given = arrays(), np.ones(HEADS, np.float32)
    given[2] = NAN
    assert counted("forward", x, **{option: given}) == [TOKENS]


@each_call
def test_other_rows_keep_their_bits(name):
    """Those of q; other gradients sum over all rows."""
    x = arrays()
    want = call(name, x, causal=True)
    x["q"][:, 100], x["q"][0, 7] = NAN, 1e6
    got = call(name, x, causal=True)
    others = np.delete(np.arange(TOKENS), [7, 100])
    for a, b in zip(got[:1], want[:1], strict=True):
        assert_bitwise(*(y.take(others, 1) for y in (a, b)), name)


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_what_backward_gets_costs_its_row_at_most(name):
    x = arrays()
    out, lse = call("forward", x)
    given = {"out": out, "lse": lse, "dlse": np.zeros_like(lse)}
    given |= {y: x[y] for y in ("dout", "q", "k", "v")}
    given[name] = given[name].copy()
    at = (1, 3, 17) if "lse" in name else (1, 17, 3)
    given[name][at] = NAN
    with rows_counted() as counts:
        dq, dk, _ = cuflash.backward(**given)
    assert counts == ([1] if name == "lse" else [])
    assert_all(dq[1, 17, 3], np.nan, "dq[1, 17, 3]")
    assert_all(dk[1, :, 1], np.nan, "dk[1, :, 1]")
    assert_finite(dq[1, 18], "dq[1, 18]")
    assert_finite(dk[:, :, 0], "dk[:, :, 0]")
