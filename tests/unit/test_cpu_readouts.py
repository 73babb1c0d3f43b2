"""Weights, their sums, entropies and their gradients on NumPy arrays."""

import tracemalloc
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import strategies
from cuflash.backends.numpy.picked import runs_of
from cuflash.backends.numpy.readout_tiles import Maxima
from cuflash.backends.numpy.reference import LARGEST_FLOAT32
from cuflash.reference import readouts
from helpers.backends import NumpyBackend
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_arrays_equal,
    assert_bitwise,
    assert_finite,
    assert_matches,
    assert_same_nonfinite,
)
from helpers.data import Case
from helpers.derivatives import EVERYTHING, GROUPED, PACKED
from helpers.flagged import by_reference
from helpers.heads import heads_first, heads_last, sum_groups
from helpers.numpy_tiles import small_tiles
from helpers.readouts import (
    CALLS,
    GRADIENTS,
    Chosen,
    call,
    call_gradients,
    cotangent,
    expected,
    expected_gradients,
    operands,
)

NUMPY = NumpyBackend()
# Rounding errors of larger scores are not of first order.
tame = {"values": ["normal"], "longest": 80}
drawn = strategies.optional_cases(NUMPY, **tame) | (
    strategies.packed_cases(NUMPY, **tame)
)
each_call = pytest.mark.parametrize("name", CALLS)
each_gradient = pytest.mark.parametrize("name", GRADIENTS)
each_kind = pytest.mark.parametrize("fields", [GROUPED, EVERYTHING, PACKED])


def assert_readout(case, name, got):
    assert_matches(got, expected(case, name), name, case)


def assert_gradients(case, name, got):
    names = "dq", "dk", "dlse", "drow_weights"
    wanted = expected_gradients(case, name)
    for which, *pair in zip(names[: len(got)], got, wanted, strict=True):
        assert_matches(*pair, which, case)


tiles = st.sampled_from([nullcontext, small_tiles])


@given(case=drawn, sizes=tiles)
def test_readouts_are_those_of_the_matrix(case, sizes):
    case = replace(case, block_q=None, block_k=None)
    with sizes():
        for name in CALLS:
            assert_readout(case, name, call(NUMPY, case, name))


@given(case=drawn, sizes=tiles)
def test_gradients_are_those_of_the_matrix(case, sizes):
    case = replace(case, block_q=None, block_k=None)
    with sizes():
        for name in GRADIENTS:
            assert_gradients(case, name, call_gradients(NUMPY, case, name))


@each_call
@each_kind
def test_readouts_of_rows_by_the_reference(name, fields):
    """Half of the rows, which are anywhere."""
    case = Case("float32", **fields)
    with by_reference(0.5):
        assert_readout(case, name, call(NUMPY, case, name))


@each_gradient
@each_kind
def test_gradients_of_rows_by_the_reference(name, fields):
    case = Case("float32", **fields)
    with by_reference(0.5):
        assert_gradients(case, name, call_gradients(NUMPY, case, name))


# What rounding does not decide ----------------------------------------------


def arrays(seqlen_q=300, seqlen_k=700, heads=4, heads_kv=2, dim=16):
    """Return q, k and lse of two batch elements, in float32."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, seqlen_q, heads, dim), np.float32)
    k = rng.standard_normal((2, seqlen_k, heads_kv, dim), np.float32)
    return q, k, cuflash.forward(q, k, k, return_lse=True)[1]


def test_memory_is_linear():
    """Tiles of 512 KiB and their masks, and what grows with tokens alone."""
    q, k, lse = (x[:1] for x in arrays(4096, 4096, 1, 1))
    cotangents = {cuflash.weight_sums_backward: np.ones_like(lse)}
    cotangents[cuflash.entropy_backward] = np.ones_like(lse)
    tracemalloc.start()
    for function in (cuflash.weight_sums, cuflash.entropy):
        function(q, k, lse, causal=True)
    for function, one in cotangents.items():
        function(one, q, k, lse, causal=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    matrix = 4096**2 * 4
    assert most < matrix / 8


def test_sums_are_the_same_bits_again():
    given = arrays()
    first = cuflash.weight_sums(*given)
    assert_bitwise(cuflash.weight_sums(*given), first, "sums")


def test_a_row_of_flags_is_a_slice_or_indices():
    given = arrays(40, 30)
    flags = np.zeros((2, 40), bool)
    flags[:, 5:9] = True
    want = cuflash.weight_sums(*given, queries=flags)
    for queries in (slice(5, 9), [5, -34, 7, 8, 5], flags[0]):
        got = cuflash.weight_sums(*given, queries=queries)
        assert_bitwise(got, want, str(queries))


def test_chosen_queries_are_visited_as_runs():
    """Not those between them: one row costs one row."""
    runs = list(runs_of(np.array([0, 1, 2, 7, 8, 11]), 2))
    want = [slice(0, 2), slice(2, 3), slice(7, 9), slice(11, 12)]
    assert runs == want


def test_no_key_is_visible():
    q, k, _ = arrays(6, 3, 2, 1)
    lse = cuflash.forward(q, k, k, causal=True, return_lse=True)[1]
    blind = {"causal": True}  # queries 0 to 2
    assert_all(cuflash.weights(q, k, lse, **blind)[:, :, :3], 0, "weights")
    assert_all(cuflash.entropy(q, k, lse, **blind)[:, :, :3], 0, "entropy")
    for reduce in ("sum", "max"):
        sums = cuflash.weight_sums(
            q, k, lse, queries=[0, 2], reduce=reduce, **blind
        )
        assert_all(sums, 0, reduce)
    for x in cuflash.weight_sums_backward(
        np.ones_like(sums), q, k, lse, queries=[0, 2], **blind
    ):
        assert_all(x, 0, "gradient")


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_nan_stays_in_its_row_and_its_column(reduce):
    q, k, lse = arrays(6, 8, 2, 1)
    q[0, 2, 1], k[1, 5] = np.nan, np.nan
    sums = cuflash.weight_sums(q, k, lse, causal=True, reduce=reduce)
    entropy = cuflash.entropy(q, k, lse, causal=True)
    seen = np.zeros(sums.shape, bool)
    seen[0, 1, :5] = True  # by query 2
    seen[1, :, 5] = True
    assert_arrays_equal(np.isnan(sums), seen, "sums")
    blind = np.zeros(entropy.shape, bool)
    blind[0, 1, 2] = blind[1, :, 3:] = True  # from query 3 on they see key 5
    assert_arrays_equal(np.isnan(entropy), blind, "entropy")


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_nan_in_a_row_weight_stays_in_what_its_row_sees(reduce):
    given, r = arrays(6, 8, 2, 1), np.ones((1, 6), np.float32)
    r[0, 2] = np.nan
    sums = cuflash.weight_sums(
        *given, row_weights=r, causal=True, reduce=reduce
    )
    assert_all(np.isnan(sums[..., :5]), True, "keys that query 2 sees")
    assert_finite(sums[..., 5:], "keys that it does not see")


def test_nan_in_a_cotangent_stays_in_pairs_that_read_it():
    given, dsums = arrays(6, 8, 2, 1), np.ones((2, 2, 8), np.float32)
    dsums[..., 5] = np.nan  # which queries from 3 on see
    dq, dk, dlse = cuflash.weight_sums_backward(dsums, *given, causal=True)
    assert_finite(dq[:, :3], "dq")
    assert_finite(dlse[..., :3], "dlse")
    assert_finite(np.delete(dk, 5, axis=1), "dk")
    assert_all(np.isnan(dk[:, 5]) & np.isnan(dq[:, 3:]).all(), True, "seen")
    dentropy = np.ones((2, 2, 6), np.float32)
    dentropy[..., 2] = np.nan
    dq, dk, dlse = cuflash.entropy_backward(dentropy, *given, causal=True)
    assert_finite(np.delete(dq, 2, axis=1), "dq of entropy")
    assert_finite(dk[:, 5:], "dk of entropy")
    assert_all(np.isnan(dk[:, :5]) & np.isnan(dq[:, 2]).all(), True, "seen")


def test_a_row_that_is_not_chosen_spreads_no_nan():
    q, k, lse = arrays(6, 8, 2, 1)
    q[:, 2] = np.nan
    for reduce in ("sum", "max"):
        given = {"queries": [0, 1, 5], "reduce": reduce}
        assert_finite(cuflash.weight_sums(q, k, lse, **given), reduce)
        one = np.ones((2, 2, 8), np.float32)
        dq, dk, dlse = cuflash.weight_sums_backward(one, q, k, lse, **given)
        assert_finite(dk, f"dk of {reduce}")
        assert_all(dq[:, 2], 0, f"dq of {reduce}")


def test_entropy_where_weights_underflow():
    """Scores 0 and -200: exp(-200) is 0 in float32."""
    q = np.full((1, 1), 200, np.float32)
    k = np.array([[0], [-1], [-1]], np.float32)
    _, lse = cuflash.forward(q, k, k, scale=1, return_lse=True)
    assert_all(cuflash.entropy(q, k, lse, scale=1), 0, "entropy")
    one = np.ones(1, np.float32)
    for x in cuflash.entropy_backward(one, q, k, lse, scale=1)[:2]:
        assert_finite(x, "gradient")


def test_the_first_of_equal_rows_has_the_gradient():
    q, k, lse = np.ones((4, 2)), np.ones((3, 2)), np.full(4, 2**0.5)
    dsums = np.array([1.0, 2.0, 3.0])
    _, _, dlse = cuflash.weight_sums_backward(
        dsums, q, k, lse, reduce="max", queries=[1, 2, 3]
    )
    assert_arrays_equal(dlse != 0, [False, True, False, False], "dlse")
    assert_allclose(dlse[1], -6, "dlse", rtol=4e-16)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
@pytest.mark.parametrize("value", [0.5, np.nan])
def test_the_first_of_equal_ones_in_any_order(rows, value):
    """Row 0 has less, the others the same."""
    best = Maxima.none((1,))
    for row in rows:
        best.add(..., np.array([value if row else 0.25]), np.array([row]))
    assert_arrays_equal(best.row, [1], "row")


def relative(score, b, h, i, j, *, table, w):
    return w * score + table[h, i - j]


def documents(b, h, i, j, *, ids):
    return ids[b, i] == ids[b, j]


def test_users_functions():
    """Half the score and a relative bias; documents as a mask."""
    q, k, _ = arrays(40, 40)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((4, 40)).astype(np.float32)
    ids = np.sort(rng.integers(0, 3, (2, 40)), axis=1)
    mods = {
        "score_mod": relative,
        "mask_mod": documents,
        "mod_arrays": {"table": table, "w": 0.5, "ids": ids},
    }
    built_in = {
        "scale": 16**-0.5 / 2,
        "bias": table[:, np.subtract.outer(range(40), range(40))],
        "mask": (ids[:, :, None] == ids[:, None])[:, None],
    }
    lse = cuflash.forward(q, k, k, **built_in, return_lse=True)[1]
    one = np.ones_like(lse)
    calls = [
        lambda **x: [cuflash.weights(q, k, lse, **x)],
        lambda **x: [cuflash.weight_sums(q, k, lse, **x)],
        lambda **x: [cuflash.entropy(q, k, lse, **x)],
        lambda **x: cuflash.weight_sums_backward(one, q, k, lse, **x),
        lambda **x: cuflash.entropy_backward(one, q, k, lse, **x),
    ]
    for number, function in enumerate(calls):
        for got, want in zip(
            function(**mods), function(**built_in), strict=True
        ):
            # Half a score is exact: sums of 40 terms may have another order,
            # each of which rounds by 2^-24 of at most the largest sum.
            atol = 40 * 2.0**-23 * abs(want).max()
            assert_allclose(got, want, f"call {number}", atol=atol)


# NaN and infinities anywhere -------------------------------------------------


def by_the_reference(case, name, q, k, lse):
    """Return a readout and its gradients, as the reference has them."""
    given = [heads_first(x, case.num_heads_q) for x in (q, k)]
    chosen, d = Chosen.of(case), cotangent(case, name).astype(np.float64)
    options = {"scale": case.scale, "causal": case.causal}
    options |= {"largest_score": LARGEST_FLOAT32, "heads_first": True}
    given = *given, lse
    if name == "weights":
        p = readouts.weights(*given, **options)
        g, counts = chosen.put(d, p.shape), chosen.put(1 + 0 * d, p.shape) > 0
        found = readouts.gradients(
            *given, lambda tile, _: (tile.of(g), tile.of(counts)), **options
        )
        return chosen.pick(p), found
    if name == "entropy":
        found = readouts.entropy_backward(d, *given, **options)
        return readouts.entropy(*given, **options), found
    flags = chosen.flags
    options |= {
        "row_weights": chosen.row_weights,
        "chosen": flags[:, None] if flags.ndim == 2 else flags,
        "reduce": "max" if name == "maxima" else "sum",
    }
    found = readouts.weight_sums_backward(d, *given, **options)
    return readouts.weight_sums(*given, **options), found


@given(case=strategies.spoiled(NUMPY, "float32", ["q", "k"]))
def test_nonfinite_numbers_are_where_the_reference_has_them(case):
    q, k, lse = operands(NUMPY, case)
    for name in GRADIENTS:
        want, gradients = by_the_reference(case, name, q, k, lse)
        assert_same_nonfinite(call(NUMPY, case, name), want, name, case)
        if name == "maxima":  # NaN or not, the row depends on roundings
            continue
        dq, dk, dlse, *_ = call_gradients(NUMPY, case, name)
        wanted = (
            heads_last(gradients.dq),
            heads_last(sum_groups(gradients.dk, case.num_heads_kv)),
            gradients.dlse,
        )
        for which, *pair in zip(
            ("dq", "dk", "dlse"), (dq, dk, dlse), wanted, strict=True
        ):
            # A sum of both infinities is NaN, by a rounding's sign.
            assert_same_nonfinite(*pair, f"{which} of {name}", case, False)
