"""Calls on NumPy arrays: the reference's numbers, or float32's.

Other tests cover the semantics, on all backends.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import strategies
from cuflash.plans import plan
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.backward import key_outer
from cuflash.request.validate import attention as validate
from helpers.backends import NumpyBackend
from helpers.compare import (
    assert_all,
    assert_arrays_equal,
    assert_bitwise,
    assert_within,
)
from helpers.data import Case, inputs
from helpers.dtypes import DTYPES, PRECISION, lse_dtype
from helpers.heads import heads_first, heads_last, sum_groups

dtypes = pytest.mark.parametrize("dtype", DTYPES)
GROUPED = {
    "batch": 2,
    "seqlen_q": 37,
    "seqlen_k": 51,
    "num_heads_q": 6,
    "num_heads_kv": 2,
    "head_dim": 24,
    "head_dim_v": 12,
    "causal": True,
}


def assert_rounded(got, exact, dtype):
    """Assert that `got` is `exact`, rounded to the dtype once.

    Its float64 sums may run in another order than ours. They have up to
    256 terms of standard normals, whose magnitudes add up to less than 256:
    256 * 256 * 2^-53 = 2^-37 at most. bfloat16 is rounded by way of float32,
    which adds 2^-24 to its unit of 2^-8, less than a thousandth.
    """
    unit, floor, _ = PRECISION[dtype.name]
    slack = 2.0**-37 * np.abs(exact).max(initial=1)
    assert got.dtype == dtype and got.shape == exact.shape
    bound = 1.001 * unit * np.abs(exact) + floor + slack
    assert_within(got, exact, bound, "result", dtype.name)


def by_heads(case, *arrays):
    """Return float64 arrays in the reference's layout."""
    return [
        heads_first(x, case.num_heads_q).astype(np.float64) for x in arrays
    ]


def reference(case, q, k, v):
    arrays = by_heads(case, q, k, v)
    out, lse = attention(*arrays, **case.meaning(), heads_first=True)
    return heads_last(out), lse


def call(case, **options):
    """Return inputs, out and lse of a case."""
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(
        q, k, v, **case.call(), return_lse=True, **options
    )
    return q, k, v, dout, out, lse


@given(data=st.data())
def test_forward_is_the_reference(data):
    case = data.draw(strategies.cases(NumpyBackend(), dtypes=("float64",)))
    q, k, v, _, out, lse = call(case)
    exact_out, exact_lse = reference(case, q, k, v)
    assert_rounded(out, exact_out, q.dtype)
    seen = exact_lse != -np.inf
    assert_all(lse == -np.inf, ~seen, "lse == -np.inf", case)
    assert_rounded(lse[seen], exact_lse[seen], lse_dtype(q.dtype))


def test_backward_is_the_reference():
    case = Case("float64", **GROUPED)
    q, k, v, dout, out, lse = call(case)
    grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    _, exact_lse = reference(case, q, k, v)
    arrays = by_heads(case, dout, q, k, v, out)
    dq, dk, dv = key_outer(
        *arrays, exact_lse, **case.meaning(), heads_first=True
    )
    exact = dq, sum_groups(dk, 2), sum_groups(dv, 2)
    for got, want in zip(grads, exact, strict=True):
        assert_rounded(got, heads_last(want), q.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype):
    case = Case(dtype, **GROUPED)
    q, k, v, dout, out, lse = call(case)
    grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    wide = [x.astype(np.float32) for x in (q, k, v, dout, out)]
    want, want_lse = cuflash.forward(*wide[:3], **case.call(), return_lse=True)
    of_wide = cuflash.backward(
        wide[3], *wide[:3], wide[4], want_lse, **case.call()
    )
    assert_bitwise(lse, want_lse, "lse")
    for got, exact in zip((out, *grads), (want, *of_wide), strict=True):
        assert_bitwise(got, exact.astype(q.dtype), dtype)


BLOCKS = strategies.legal_blocks("float64", 24, 12)


@pytest.mark.parametrize(("block_q", "block_k"), BLOCKS)
def test_block_sizes_change_rounding_only(block_q, block_k):
    case = Case("float64", block_q=block_q, block_k=block_k, **GROUPED)
    q, k, v, dout, out, lse = call(case)
    assert_rounded(out, reference(case, q, k, v)[0], q.dtype)
    grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    arrays = by_heads(case, dout, q, k, v)
    dq, dk, dv = attention_vjp(*arrays, **case.meaning(), heads_first=True)
    exact = dq, sum_groups(dk, 2), sum_groups(dv, 2)
    for got, want in zip(grads, exact, strict=True):
        assert_rounded(got, heads_last(want), q.dtype)


@pytest.mark.parametrize("layout", ["axes_reversed", "broadcast"])
def test_strides_change_no_bit(layout):
    case = Case(**GROUPED, layout=layout)
    q, k, v, *_, out, lse = call(case)
    same = cuflash.forward(
        *(x.copy() for x in (q, k, v)), causal=True, return_lse=True
    )
    for got, want in zip((out, lse), same, strict=True):
        assert_bitwise(got, want, layout)


def test_ids_of_all_batches():
    """Of one axis they are those of every batch element."""
    case = Case(**GROUPED)
    q, k, v, dout, *_ = call(case)
    ids = [np.arange(n, dtype=np.int32) // 10 for n in (37, 51)]
    results = []
    for own in (ids, [np.tile(x, (2, 1)) for x in ids]):
        given = {"segment_ids_q": own[0], "segment_ids_k": own[1]}
        out, lse = cuflash.forward(q, k, v, **given, return_lse=True)
        grads = cuflash.backward(dout, q, k, v, out, lse, **given)
        results.append((out, lse, *grads))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b, "of all")


# What stands beside a batch element changes none of its bits ----------------


@dtypes
@pytest.mark.parametrize("spoil", [np.nan, 1e4, 10.0])
def test_batch_elements_are_computed_alone(dtype, spoil):
    """Where its neighbour is the reference's, or of larger scores."""
    case = Case(dtype, **GROUPED)
    q, k, v, dout = inputs(case)
    q[1] *= q.dtype.type(spoil)
    options = case.call()
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse, **options)
    given = [x[:1] for x in (dout, q, k, v, out, lse)]
    alone = cuflash.forward(*given[1:4], **options, return_lse=True)
    of_alone = cuflash.backward(*given, **options)
    for got, want in zip((out, lse, *grads), (*alone, *of_alone), strict=True):
        assert_bitwise(got[:1], want, dtype)


# What no GPU runs is refused here, too --------------------------------------


def complaint(error, **options):
    """Return the text of the error of a call of zeros, forward."""
    q = np.zeros((1, 4, 1, options.pop("head_dim", 8)), np.float32)
    with pytest.raises(error) as caught:
        cuflash.forward(q, q, q, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"softcap": 3.0}, " with softcap"),
        (
            {"softcap": 3.0, "dropout": 0.5, "seed": 1},
            " with softcap and dropout",
        ),
    ],
)
def test_blocks_that_no_kernel_has(options, said):
    text = complaint(cuflash.ValueRangeError, block_q=7, **options)
    assert text.startswith(
        "block_q 7, block_k None cannot be run by any forward kernel for "
        f"head_dim 8, head_dim_v 8, float32{said} on any GPU; these (block_q, "
        "block_k) can: (4, 4), "
    )


def test_blocks_that_no_backward_kernel_has():
    q = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(cuflash.ValueRangeError, match="any backward kernel"):
        cuflash.backward(q, q, q, q, q, q[..., 0].swapaxes(1, 2), block_k=7)


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_blocks_that_some_gpu_runs_are_run(arch):
    """The tuned tiles of each family."""
    device = plan.device_of_arch(f"sm_{arch}{'a' if arch == 90 else ''}")
    for dtype in DTYPES if arch >= 80 else ("float32", "float64"):
        q = np.zeros((1, 4, 1, 64), DTYPES[dtype])
        problem = validate.forward(q, q, q).problem
        tile = plan.plan(problem, device).tile
        cuflash.forward(q, q, q, block_q=tile.block_q, block_k=tile.block_k)


def test_rejected_calls_write_nothing():
    out = np.full((1, 4, 1, 8), 5, np.float32)
    complaint(cuflash.ValueRangeError, block_q=7, out=out)
    assert_all(out, 5, "out")


# lse, which loses the digits that gradients need -----------------------------


def test_gradients_of_many_keys_match_dense_ones():
    """Several tiles of queries and keys, in all kinds of scores.

    dq, dk and dv are sums of at most 1200 terms of float32 roundings of P and
    dS at random signs; 2^-24 times the root of that, times |S| up to 200.
    """
    case = Case("float32", 1, 300, 1200, 2, 1, 16, 8, causal=True)
    for factor in (1, 8):
        q, k, v, dout = inputs(case)
        q *= np.float32(factor)
        out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
        grads = cuflash.backward(dout, q, k, v, out, lse, causal=True)
        arrays = by_heads(case, dout, q, k, v)
        dq, dk, dv = attention_vjp(*arrays, causal=True, heads_first=True)
        exact = dq, sum_groups(dk, 1), sum_groups(dv, 1)
        for got, want in zip(grads, exact, strict=True):
            error = np.abs(got - heads_last(want)).max()
            assert error <= 2.0**-24 * 35 * 200 * np.abs(want).max()


@pytest.mark.parametrize(("size", "rows"), [(1e2, 3), (1e7, 3), (1e30, 2)])
def test_gradients_of_large_scores(size, rows):
    """exp(S - lse) with lse rounded to float32 would be off by |lse| 2^-24.

    dV = P^T dO, and P is what softmax gives: 1, 0 and, in the third row, a
    half, as far as float64 can tell m + log(2) from m: 1e7 * 2^-53 < 2^-29.
    """
    q = np.array([[1, 0], [0, 1], [1, 1]], np.float32) * np.float32(size)
    k = np.array([[3, 1], [1, 3]], np.float32) / np.float32(7)
    dout, v = np.eye(3, dtype=np.float32), np.eye(2, 3, dtype=np.float32)
    q, dout = q[:rows], dout[:rows]
    out, lse = cuflash.forward(q, k, v, scale=1, return_lse=True)
    _, _, dv = cuflash.backward(dout, q, k, v, out, lse, scale=1)
    exact = np.array([[1, 0, 0.5], [0, 1, 0.5]])[:, :rows] @ np.eye(rows, 3)
    assert_within(dv, exact, 2.0**-29 + 2.0**-25, "dv")


def test_lse_of_more_keys_than_these_is_used():
    """Gradients over two sets of keys, each with the lse of their union."""
    case = Case("float64", seqlen_k=40, num_heads_q=2)
    q, k, v, dout, out, lse = call(case)
    dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse)
    parts = [
        cuflash.backward(dout, q, k[:, i], v[:, i], out, lse)
        for i in (np.s_[:25], np.s_[25:])
    ]
    assert_rounded(parts[0][0] + parts[1][0], dq, q.dtype)
    for whole, i in ((dk, 1), (dv, 2)):
        both = np.concatenate([part[i] for part in parts], axis=1)
        assert_rounded(both, whole, q.dtype)


def test_lse_of_more_keys_is_used_in_float32_too():
    """Other keys have half of the row's weight, so P and dV halve."""
    q, k, v, dout, out, lse = call(Case("float32"))
    *_, dv = cuflash.backward(dout, q, k, v, out, lse)
    more = lse + np.log(np.float32(2))
    *_, half = cuflash.backward(dout, q, k, v, out, more)
    # lse is below 8 and rounded twice: 2 * 2^-22 of P, a sum of 16 rows
    size = 16 * np.abs(dout).max()
    assert_within(half, dv / 2, size * 2.0**-20, "dv")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 128.0), ("float64", 2.0**13), ("float32", 2.0**100)],
)
def test_a_large_lse_of_more_keys_is_used(dtype, size):
    """One key of two: its score is 64ths below lse, not all of it.

    Undoing the rounding of lse would make its weight 1. The largest size is
    beyond float32's tiles, and left to the reference.
    """
    q = np.full((1, 1, 1, 1), size, dtype)
    k = np.reshape([1, 1 + 2.0**-6], (1, 2, 1, 1)).astype(dtype)
    v = np.ones_like(k)
    out, lse = cuflash.forward(q, k, v, scale=1, return_lse=True)
    *_, dv = cuflash.backward(v[:, :1], q, k[:, :1], v[:, :1], out, lse,
                              scale=1)  # fmt: skip
    weight = np.exp(-size / 64) / (1 + np.exp(-size / 64))
    # Of the exponent: lse's rounding, and as much in exp and the difference.
    unit = np.finfo(dtype).eps * min(size, 2.0**13)
    assert_within(dv, weight, 4 * unit * weight, "dv")


# Shapes with nothing in them -------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    "empty",
    [
        {"batch": 0},
        {"num_heads_q": 0},
        {"num_heads_q": 0, "num_heads_kv": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"seqlen_q": 0, "seqlen_k": 0},
    ],
)
def test_empty(dtype, empty):
    case = Case(dtype, **(GROUPED | empty))
    q, k, v, dout, out, lse = call(case)
    assert out.shape == dout.shape
    assert_all(out, 0, "out", case)
    assert lse.shape == (case.batch, case.num_heads_q, case.seqlen_q)
    assert_all(lse, -np.inf, "lse", case)
    grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    for got, like in zip(grads, (q, k, v), strict=True):
        assert got.shape == like.shape and got.dtype == like.dtype
        assert_all(got, 0, "got", case)
    merged, lse_of_both = cuflash.merge_states(out, lse, out, lse)
    assert merged.shape == out.shape and lse_of_both.shape == lse.shape


# Results ---------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_out_is_written_and_returned(dtype, rank):
    index = {4: (), 3: (0,), 2: (0, slice(None), 0)}[rank]
    q, k, v, dout = (x[index] for x in inputs(Case(dtype, num_heads_q=2)))
    k, v = (k, v) if rank == 2 else (k[..., :1, :], v[..., :1, :])
    plain = cuflash.forward(q, k, v)
    assert cuflash.forward(q, k, v, out=dout) is dout
    assert_all(dout, plain, "dout")


@dtypes
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_two_states_merge_at_any_rank(dtype, rank):
    """States of lse 0 and log 3 have weights 1/4 and 3/4."""
    out_shape = (2, 5, 3, 8)[4 - rank :] if rank != 2 else (5, 8)
    lse_shape = (2, 3, 5)[4 - rank :] if rank != 2 else (5,)
    kind = lse_dtype(DTYPES[dtype])
    out_a, lse_a = np.ones(out_shape, DTYPES[dtype]), np.zeros(lse_shape, kind)
    out_b, lse_b = out_a * out_a.dtype.type(5), lse_a + np.log(kind.type(3))
    out, lse = cuflash.merge_states(out_a, lse_a, out_b, lse_b)
    # A power of two, so what is off in the weights rounds to it in out; in
    # lse the two roundings of log 3 and log 4, in double precision one each.
    unit = PRECISION[dtype].unit if dtype == "float64" else 2.0**-24
    assert_within(out, 4, 4 * 2 * unit, "out")
    assert_within(lse, np.log(4), 4 * unit, "lse")
    assert out.dtype == out_a.dtype and lse.dtype == kind


def test_results_are_new_arrays_in_c_order():
    q, k, v, dout, out, lse = call(Case(**GROUPED, layout="axes_reversed"))
    grads = cuflash.backward(dout, q, k, v, out, lse, causal=True)
    for result in (out, lse, *grads):
        assert result.flags.c_contiguous and result.flags.writeable
        assert result.base is None or result.base.flags.c_contiguous


def test_inputs_are_only_read():
    q, k, v, dout, out, lse = call(Case(**GROUPED))
    for array in (q, k, v, dout, out, lse):
        array.flags.writeable = False
    cuflash.backward(dout, q, k, v, out, lse, causal=True)
    cuflash.merge_states(out, lse, out, lse)


def test_bytes_in_the_other_order():
    case = Case(**GROUPED)
    q, k, v, _, out, _ = call(case)
    swapped = (x.astype(x.dtype.newbyteorder()) for x in (q, k, v))
    result = cuflash.forward(*swapped, causal=True)
    assert result.dtype == q.dtype
    assert_all(result, out, "result", case)


@dtypes
def test_a_caller_that_has_numpy_raise(dtype):
    """Infinity, NaN and exp(-1000) raise no error."""
    q, k, v, dout = inputs(Case(dtype, seqlen_q=9, seqlen_k=5, causal=True))
    q[:, 8], k[:, 4], v[:, 3, :, 0] = 200, 200, np.inf
    with np.errstate(all="raise"):
        out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
        cuflash.backward(dout, q, k, v, out, lse, causal=True)
        cuflash.merge_states(out, lse, out, lse)
    assert_all(np.isfinite(out[:, 7, :, 0].astype(float)), 0, "finite")


def test_rounding_to_float16_overflows_to_infinity():
    v = np.full((1, 4), 65504, np.float16)
    ones = np.ones((1, 4), np.float16)
    out, lse = cuflash.forward(ones, ones, v, return_lse=True)
    assert_all(out, 65504, "out")
    with np.errstate(all="raise"):
        *_, dv = cuflash.backward(
            v, np.ones((2, 4), np.float16)[:1], ones, v, out, lse - 1
        )
    assert_all(dv, np.inf, "dv")


def test_packed_sequences_match_separate_calls():
    """With 0, 1 and more tokens; one unused token at the end."""
    case = Case("float32", 1, 9, 11, 4, 2, arrays_of=("sink",))
    q, k, v, dout = (x[0] for x in inputs(case))
    offsets = np.array([[0, 0, 1, 8], [0, 2, 3, 10]], np.int32)
    options = {**case.options(), "causal": True, "dropout": 0.5, "seed": 3}
    options |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    dq, dk, dv, dsink = cuflash.backward(
        dout, q, k, v, out, lse, **options, return_dsink=True
    )
    assert_all(out[8:], 0, "out[8:]", case)
    assert_all(dk[10:], 0, "dk[10:]", case)
    assert dsink.shape == (4,)
    packed = cuflash.forward(q, k, v, **{**options, "dropout": 0.0})
    alone = {"causal": True, **case.options()}
    plain = cuflash.forward(q[1:8], k[3:10], v[3:10], **alone)
    assert_arrays_equal(packed[1:8], plain, "packed[1:8]")


def test_slopes_of_sequences_are_those_of_separate_calls():
    """With 0, 1 and more tokens; one unused token at the end."""
    case = Case("float32", 1, 9, 11, 4, 2, causal=True)
    q, k, v, dout = (x[0] for x in inputs(case))
    of_q, of_k = np.array([[0, 0, 1, 8], [0, 2, 3, 10]], np.int32)
    slopes = np.random.default_rng(0).random((3, 4), np.float32)
    packed = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "causal": True}
    packed["alibi_slopes"] = slopes
    out, lse = cuflash.forward(q, k, v, **packed, return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse, **packed)
    for number, own in enumerate(slopes):
        i = slice(of_q[number], of_q[number + 1])
        j = slice(of_k[number], of_k[number + 1])
        one, alone = (q[i], k[j], v[j]), {"causal": True, "alibi_slopes": own}
        want = cuflash.forward(*one, **alone, return_lse=True)
        assert_arrays_equal(out[i], want[0], "out[i]")
        assert_arrays_equal(lse[:, i], want[1], "lse[:, i]")
        want_grads = cuflash.backward(dout[i], *one, *want, **alone)
        for got, place, expected in zip(
            grads, (i, j, j), want_grads, strict=True
        ):
            assert_arrays_equal(got[place], expected, "got[place]")
