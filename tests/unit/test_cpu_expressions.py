"""score_mod, mask_mod and dmod on NumPy arrays, against the reference."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash
from cuflash.backends.numpy.expressions import Expressions
from cuflash.errors import ExpressionError
from cuflash.reference.attention import attention, attention_vjp
from cuflash.reference.packed import packed_attention, packed_attention_vjp
from helpers import drawn_expressions as drawn
from helpers.compare import (
    assert_allclose,
    assert_arrays_equal,
    assert_finite,
)
from helpers.flagged import rows_counted

BATCH, QUERIES, KEYS, HEADS, HEADS_KV, DIM = 2, 70, 150, 4, 2, 8
# Sums of a hundred terms of about 1, of scores up to 8: 2^10 u and more.
ATOL = {"float64": 1e-12, "float32": 5e-4}


def inputs(dtype="float64", queries=QUERIES, keys=KEYS):
    rng = np.random.default_rng(0)
    shapes = (queries, HEADS), (keys, HEADS_KV), (keys, HEADS_KV)
    return [
        rng.standard_normal((BATCH, n, heads, DIM)).astype(dtype)
        for n, heads in (*shapes, (queries, HEADS))
    ]


def called(q, k, v, dout, **options):
    """Return out, lse, dq, dk and dv, and dmod as one more dict if any."""
    names = options.pop("return_dmod", ())
    out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
    extra = {"return_dmod": names} if names else {}
    grads = cuflash.backward(dout, q, k, v, out, lse, **extra, **options)
    return out, lse, *grads


def expected(q, k, v, dout, **options):
    """Return the same by the reference."""
    q, k, v, dout = (
        np.repeat(x, HEADS // x.shape[2], axis=2).swapaxes(1, 2)
        for x in (q, k, v, dout)
    )
    forward = {x: y for x, y in options.items() if x != "return_dmod"}
    out, lse = attention(q, k, v, heads_first=True, **forward)
    dq, dk, dv, *others = attention_vjp(
        dout, q, k, v, heads_first=True, **options
    )
    groups = BATCH, HEADS_KV, HEADS // HEADS_KV, KEYS, DIM
    dk, dv = (x.reshape(groups).sum(axis=2) for x in (dk, dv))
    return out.swapaxes(1, 2), lse, *(
        x.swapaxes(1, 2) for x in (dq, dk, dv)
    ), *others[-1:]  # fmt: skip


def assert_results(got, want, atol, case=""):
    names = "out", "lse", "dq", "dk", "dv", "dmod"
    for name, a, b in zip(names, got, want, strict=False):
        if isinstance(a, dict):
            for x, y in a.items():
                assert_allclose(y, b[x], x, atol=atol, case=case)
        else:
            assert_allclose(a, b, name, atol=atol, case=case)


def relative(score, b, h, i, j, *, table):
    return score + table[h, i - j + 20]


def scaled(score, b, h, i, j, *, table):
    return score * np.tanh(table[h, 3]) + table[b, j] * table[h, i]


def bent(score, b, h, i, j, *, table):
    """Its slope is itself: memory of the score."""
    return np.exp(score - 1.0) * 1.0 + 0.0 * table[h, 0]


def read(score, b, h, i, j, *, table):
    return table[h, j]


def same(score, b, h, i, j):
    return score


def causal(b, h, i, j, *, seqlen_q, seqlen_k):
    return j <= i + seqlen_k - seqlen_q


def documents(b, h, i, j, *, ids):
    return ids[b, i] == ids[b, j]


def by_head(b, h, i, j):
    return ((i - j) % (h + 1) == 0) & (abs(i - j) < 40)


TABLE = np.random.default_rng(1).standard_normal((HEADS, 100))
IDS = np.sort(np.random.default_rng(2).integers(0, 5, (BATCH, KEYS)), axis=1)
WITH_TABLE = {"mod_arrays": {"table": TABLE}, "return_dmod": ("table",)}
CASES = {
    "relative": {"score_mod": relative, **WITH_TABLE},
    "scaled": {"score_mod": scaled, **WITH_TABLE},
    "bent": {"score_mod": bent, **WITH_TABLE},
    "read": {"score_mod": read, "causal": True, **WITH_TABLE},
    "same": {"score_mod": same, "softcap": 2.0},
    "causal": {"mask_mod": causal},
    "documents": {"mask_mod": documents, "mod_arrays": {"ids": IDS}},
    "by head": {"mask_mod": by_head, "window": (None, 10)},
    "both": {
        "score_mod": relative,
        "mask_mod": documents,
        "mod_arrays": {"table": TABLE, "ids": IDS},
        "return_dmod": ("table",),
        "softcap": 5.0,
        "causal": True,
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.1]),
        "sink": np.array([0.5, -0.5, 0.0, 1.0]),
    },
}


def of_dtype(dtype, options):
    """Return options with their reals in a dtype."""

    def one(x):
        return (
            x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x
        )

    own = {x: one(y) for x, y in options.items()}
    if "mod_arrays" in own:
        arrays = own["mod_arrays"]
        own["mod_arrays"] = {x: one(y) for x, y in arrays.items()}
    return own


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_references(name, dtype):
    arrays, options = inputs(dtype), of_dtype(dtype, CASES[name])
    got = called(*arrays, **options)
    want = expected(*arrays, **options)
    assert_results(got, want, ATOL[dtype])


@pytest.mark.parametrize("blocks", [(16, 16), (4, 4), (32, 64)])
@pytest.mark.parametrize("name", ["both", "by head"])
def test_tiles_may_have_any_size(name, blocks):
    block_q, block_k = blocks
    arrays, options = inputs(), CASES[name]
    got = called(*arrays, block_q=block_q, block_k=block_k, **options)
    assert_results(got, expected(*arrays, **options), ATOL["float64"])


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_drawn_functions_are_the_references(of_score, of_mask):
    arrays = inputs()
    options = {
        "score_mod": drawn.score(of_score),
        "mask_mod": drawn.mask(of_mask),
        "mod_arrays": {
            x: y.astype(np.float64) if x == "table" else y
            for x, y in (drawn.arrays() | drawn.NUMBERS).items()
            if x != "ratio"
        } | {"ratio": 0.75},
    }  # fmt: skip
    try:
        got = called(*arrays, return_dmod=("table",), **options)
    except ExpressionError:  # constants alone
        assume(False)
    with np.errstate(all="ignore"):
        want = expected(*arrays, return_dmod=("table",), **options)
    assert_results(got, want, 1e-9, f"{of_score}, {of_mask}")


# Tiles ----------------------------------------------------------------------


def tiles_tested(options):
    """Return the tiles whose pairs a forward call tests."""
    arrays = inputs(queries=512, keys=512)[:3]
    blocks = {"block_q": 64, "block_k": 64}
    with mock.patch.object(
        Expressions, "visible", autospec=True, side_effect=Expressions.visible
    ) as visible:
        cuflash.forward(*arrays, **blocks, **options)
    return {tuple(x.args[1]) for x in visible.call_args_list}


def test_whole_tiles_are_not_tested():
    diagonal = {(i, i + 64, i, i + 64) for i in range(0, 512, 64)}
    assert tiles_tested({"mask_mod": causal}) == diagonal


def test_hidden_tiles_are_not_tested():
    ids = np.repeat([0, 1], 256)
    ids = np.stack([ids, ids])
    options = {"mask_mod": documents, "mod_arrays": {"ids": ids}}
    assert tiles_tested(options) == set()


# Arrays ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "bfloat16"]
)
def test_a_gradient_is_like_its_array(dtype):
    table = TABLE.astype(dtype)[:, ::-2]
    arrays = inputs("float32")
    *_, dmod = called(
        *arrays,
        score_mod=relative,
        mod_arrays={"table": table},
        return_dmod=("table",),
    )
    assert dmod["table"].dtype == table.dtype
    assert dmod["table"].shape == table.shape


@pytest.mark.parametrize("order", ["C", "F", "reversed", "wide", "swapped"])
def test_arrays_may_have_any_strides(order):
    table = {
        "C": TABLE,
        "F": np.asfortranarray(TABLE),
        "reversed": TABLE[::-1, ::-1].copy()[::-1, ::-1],
        "wide": np.repeat(TABLE, 3, axis=1)[:, ::3],
        "swapped": TABLE.astype(TABLE.dtype.newbyteorder()),
    }[order]
    arrays, options = inputs(), dict(CASES["relative"])
    want = called(*arrays, **options)
    got = called(*arrays, **(options | {"mod_arrays": {"table": table}}))
    for a, b in zip(got[:5], want, strict=False):
        assert_arrays_equal(a, b, "result")
    assert_arrays_equal(got[5]["table"], want[5]["table"], "dmod")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint64"])
def test_masks_read_arrays_of_any_dtype(dtype):
    near = (np.arange(200).reshape(2, 100) % 97).astype(dtype)

    def nearby(b, h, i, j, *, near):
        return (near[b, i] - near[b, j] < 3) | (near[b, j] == 50)

    arrays = inputs()
    options = {"mask_mod": nearby, "mod_arrays": {"near": near}}
    got = called(*arrays, **options)
    assert_results(got, expected(*arrays, **options), ATOL["float64"])


def wraps(b, h, i, j, *, n):
    large = np.where(i >= 0, 2**62, 2**62)  # a constant
    sums = (n + i > j) ^ (large * 2 - j > 0)
    return sums | (abs(n * (i + 2)) < j) | (-n - i - 2 > 0)


def test_ints_wrap_as_the_references():
    arrays = inputs()
    options = {"mask_mod": wraps, "mod_arrays": {"n": 2**63 - 2}}
    got = called(*arrays, **options)
    assert_results(got, expected(*arrays, **options), ATOL["float64"])


def test_an_empty_array_reads_0():
    arrays = inputs()
    empty = {"mod_arrays": {"table": np.zeros((0, 5))}}
    got = called(*arrays, score_mod=relative, return_dmod=("table",), **empty)
    assert_results(got[:5], called(*arrays), ATOL["float64"])
    assert got[5]["table"].shape == (0, 5)


def test_an_array_that_no_score_reads_has_a_gradient_of_0():
    def capped(score, b, h, i, j, *, table):
        return 3.0 * np.tanh(score / 3.0)

    arrays = inputs()
    got = called(*arrays, score_mod=capped, **WITH_TABLE)
    assert_results(got[:5], called(*arrays, softcap=3.0), ATOL["float64"])
    assert_arrays_equal(got[5]["table"], np.zeros(TABLE.shape), "dmod")


# Sequences, and numbers beyond bounds ---------------------------------------


def test_a_packed_sequence_is_a_batch():
    q, k, v, dout = (x[0] for x in inputs())
    offsets_q, offsets_k = np.array([0, 20, 20, 65]), np.array([0, 30, 40, 90])
    packed = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k}
    options = {"score_mod": scaled, "mask_mod": causal, **WITH_TABLE}
    out, lse, dq, dk, dv, dmod = called(q, k, v, dout, **packed, **options)
    q, k, v, dout = (
        np.repeat(x, HEADS // x.shape[1], axis=1).swapaxes(0, 1)
        for x in (q, k, v, dout)
    )
    options["heads_first"] = True
    *_, want = packed_attention_vjp(
        dout, q, k, v, offsets_q, offsets_k, **options
    )
    del options["return_dmod"]
    result = packed_attention(q, k, v, offsets_q, offsets_k, **options)
    assert_allclose(out.swapaxes(0, 1), result[0], "out", atol=1e-12)
    assert_allclose(lse, result[1], "lse", atol=1e-12)
    assert_allclose(dmod["table"], want["table"], "dmod", atol=1e-12)


def beyond(score, b, h, i, j, *, table):
    """Large scores, infinite ones, and NaN; NaN in q is none after it."""
    x = np.where(i % 7 == 0, score * 1e6, score + table[h, j])
    x = np.where(i % 7 == 1, np.log(score), x)
    x = np.where((i % 7 == 2) & (j > 3), -np.inf, x)
    return np.where(i % 7 == 3, 1.0 * j, x)


@pytest.mark.parametrize("masks", [{}, {"mask_mod": by_head}])
@pytest.mark.parametrize("dtype", ATOL)
def test_rows_beyond_bounds_are_the_references(dtype, masks):
    q, k, v, dout = inputs(dtype)
    q[0, 3], k[1, 5], v[0, 7], dout[1, 9, 2] = np.nan, np.inf, np.nan, np.nan
    options = of_dtype(dtype, {"score_mod": beyond, **WITH_TABLE, **masks})
    with rows_counted() as counts:
        got = called(q, k, v, dout, **options)
    assert sum(counts) > 0
    with np.errstate(all="ignore"):
        want = expected(q, k, v, dout, **options)
    names = "out", "lse", "dq", "dk", "dv"
    for name, a, b in zip(names, got, want, strict=False):
        assert_arrays_equal(np.isnan(a), np.isnan(b), name)
    # Row 10 sees the keys' numbers, whatever their scores were.
    assert_finite(got[0][1, 10], "out of row 10")
    nan = {x: np.isnan(y) for x, y in want[5].items()}
    assert_arrays_equal(np.isnan(got[5]["table"]), nan["table"], "dmod")


def test_masked_pairs_may_have_any_slope():
    def wild(score, b, h, i, j, *, table):
        x = np.log(score * 0) / table[h, j]
        return np.where(j <= i, score * table[0, 0], x)

    arrays = inputs(queries=KEYS)
    table = np.ones((HEADS, KEYS))
    options = {"mod_arrays": {"table": table}, "return_dmod": ("table",)}
    got = called(*arrays, score_mod=wild, causal=True, **options)
    want = called(*arrays, causal=True)
    for a, b in zip(got[:5], want, strict=True):
        assert_allclose(a, b, "result", atol=1e-13)
    assert_finite(got[5]["table"], "dmod")
