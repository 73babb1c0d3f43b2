"""What forward_kvcache refuses, and what the message says."""

from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request.problem import KVCache, Problem, Rotary
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import kvcache_values
from helpers.compare import assert_all, assert_finite

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# Two sequences, four query heads of two key heads.
Q, CACHE, PAGES = (2, 3, 4, 8), (2, 10, 2, 8), (6, 4, 2, 8)


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def ints(*shape):
    return np.zeros(shape, np.int32)


def plain(**changes):
    return {"q": zeros(*Q), "k_cache": zeros(*CACHE),
            "v_cache": zeros(*CACHE), **changes}  # fmt: skip


def paged(**changes):
    caches = {"k_cache": zeros(*PAGES), "v_cache": zeros(*PAGES)}
    return plain(**caches, page_table=ints(2, 3), **changes)


def growing(**changes):
    """Of two tokens, after five."""
    new = {"k_new": zeros(2, 2, 2, 8), "v_new": zeros(2, 2, 2, 8)}
    return plain(**{**new, "cache_seqlens": 5, **changes})


def packed(**changes):
    return plain(**{"q": zeros(6, 4, 8), "cu_seqlens_q": ints(3), **changes})


def rotated(*shape, **changes):
    tables = {name: zeros(*(shape or (9, 4)), dtype=np.float32)
              for name in ("rotary_cos", "rotary_sin")}  # fmt: skip
    return growing(**{**tables, **changes})


def float8(**changes):
    scale = np.ones(2, np.float32)
    caches = {name: zeros(*CACHE, dtype=FLOAT8)
              for name in ("k_cache", "v_cache")}  # fmt: skip
    given = {**caches, "k_scale": scale, "v_scale": scale}
    return plain(**{**given, **changes})


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


def call(given):
    return validate_kvcache.forward_kvcache(**given)


def complaint(error, given):
    with pytest.raises(CuflashError) as caught:
        cuflash.forward_kvcache(**given)
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [plain(), paged(), growing(), packed(), rotated(), float8()],
    ids=["plain", "paged", "growing", "packed", "rotated", "float8"],
)
def test_good_calls(given):
    """Of which the others differ in one argument."""
    out, lse = cuflash.forward_kvcache(**given, return_lse=True)
    assert out.shape == given["q"].shape and out.dtype == np.float16
    assert lse.shape == np.swapaxes(out[..., 0], -1, -2).shape


# What is missing or too much -------------------------------------------------

PARTNERS = {
    "k_new alone": (
        without(growing(), "v_new"),
        "k_new is given without v_new, expected v_new too: a token has a key "
        "and a value",
    ),
    "v_new alone": (
        without(growing(), "k_new"),
        "v_new is given without k_new, expected k_new too: a token has a key "
        "and a value",
    ),
    "k_new without a length": (
        without(growing(), "cache_seqlens"),
        "k_new is given without cache_seqlens, expected cache_seqlens too: "
        "new tokens are appended there",
    ),
    "cos alone": (
        without(rotated(), "rotary_sin"),
        "rotary_cos is given without rotary_sin, expected rotary_sin too: a "
        "rotation has a cosine and a sine",
    ),
    "sin alone": (
        without(rotated(), "rotary_cos"),
        "rotary_sin is given without rotary_cos, expected rotary_cos too: a "
        "rotation has a cosine and a sine",
    ),
    "rotary without new keys": (
        without(rotated(), "k_new", "v_new"),
        "rotary_cos is given without k_new, expected k_new too: keys are "
        "rotated when they are appended",
    ),
    "k_scale alone": (
        without(float8(), "v_scale"),
        "k_scale is given without v_scale, expected v_scale too: both caches "
        "are float8",
    ),
    "v_scale alone": (
        without(float8(), "k_scale"),
        "v_scale is given without k_scale, expected k_scale too: both caches "
        "are float8",
    ),
    "max_seqlen_q alone": (
        plain(max_seqlen_q=3),
        "max_seqlen_q is given without cu_seqlens_q, expected cu_seqlens_q "
        "too: it bounds the lengths of packed q",
    ),
    "float8 without scales": (
        without(float8(), "k_scale", "v_scale"),
        "k_scale and v_scale are None, expected arrays as k_cache has dtype "
        "float8_e4m3fn: a value is stored * scale",
    ),
    "bytes without scales": (
        plain(k_cache=zeros(*CACHE, dtype=np.uint8),
              v_cache=zeros(*CACHE, dtype=np.uint8)),
        "k_scale and v_scale are None, expected arrays as k_cache has dtype "
        "uint8: a value is stored * scale",
    ),
    "scales of float16": (
        float8(k_cache=zeros(*CACHE), v_cache=zeros(*CACHE)),
        "k_scale is given with k_cache of dtype float16, expected "
        "float8_e4m3fn: other caches have no scales",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTNERS)
def test_partners(name):
    given, text = PARTNERS[name]
    assert complaint(ValueRangeError, given) == text


@pytest.mark.parametrize("name", ["cache_batch_idx", "cache_leftpad"])
def test_pages_exclude_slots(name):
    assert complaint(UnsupportedError, paged(**{name: ints(2)})) == (
        f"{name} is given with page_table, expected one of them: a page "
        "table tells where each token is, from the first on"
    )


# Dtypes ----------------------------------------------------------------------

INDICES = {
    "cache_seqlens": (plain, (2,)),
    "cache_batch_idx": (plain, (2,)),
    "cache_leftpad": (plain, (2,)),
    "page_table": (paged, (2, 3)),
}


@pytest.mark.parametrize("name", [*INDICES, "cu_seqlens_q"])
@pytest.mark.parametrize("dtype", ["float64", "bool", "float32"])
def test_dtype_of_indices(name, dtype):
    make, shape = INDICES.get(name, (packed, (3,)))
    given = {**make(), name: zeros(*shape, dtype=dtype)}
    assert complaint(DTypeError, given) == (
        f"{name} has dtype {dtype}, expected an integer dtype: convert "
        f"{name} to int32"
    )


DTYPES = {
    "q": (
        plain(q=zeros(*Q, dtype=int)),
        "q has dtype int64, expected float16, bfloat16, float32 or float64",
    ),
    "k_cache": (
        plain(k_cache=zeros(*CACHE, dtype=np.float32)),
        "k_cache has dtype float32, expected float16 as in q, or "
        "float8_e4m3fn, or its bytes as uint8",
    ),
    "another float8": (
        plain(k_cache=zeros(*CACHE, dtype=ml_dtypes.float8_e5m2)),
        "k_cache has dtype float8_e5m2, expected float16 as in q, or "
        "float8_e4m3fn, or its bytes as uint8",
    ),
    "v_cache": (
        plain(v_cache=zeros(*CACHE, dtype=FLOAT8)),
        "v_cache has dtype float8_e4m3fn, expected float16 as in k_cache: "
        "both caches have one dtype",
    ),
    "v_cache of float8": (
        float8(v_cache=zeros(*CACHE)),
        "v_cache has dtype float16, expected float8_e4m3fn as in k_cache: "
        "both caches have one dtype",
    ),
    "float64 and float8": (
        float8(q=zeros(*Q, dtype=float)),
        "k_cache has dtype float8_e4m3fn, expected float64 as in q: float8 "
        "caches are for float16, bfloat16 and float32",
    ),
    "k_new": (
        growing(k_new=zeros(2, 2, 2, 8, dtype=np.float32)),
        "k_new has dtype float32, expected float16 as in q: arrays of one "
        "call have one dtype",
    ),
    "out": (
        plain(out=zeros(*Q, dtype=np.float32)),
        "out has dtype float32, expected float16 as in q: arrays of one call "
        "have one dtype",
    ),
    "scale": (
        float8(k_scale=zeros(2)),
        "k_scale has dtype float16, expected float32",
    ),
    "rotary_cos": (
        rotated(rotary_cos=zeros(9, 4, dtype=float)),
        "rotary_cos has dtype float64, expected float32 or float16 as q has "
        "dtype float16",
    ),
    "rotary_sin": (
        rotated(rotary_sin=zeros(9, 4)),
        "rotary_sin has dtype float16, expected float32 as rotary_cos",
    ),
    "alibi_slopes": (
        plain(alibi_slopes=zeros(4)),
        "alibi_slopes has dtype float16, expected float32: slopes are "
        "float32, or float64 with float64 arrays; convert it",
    ),
    "sink": (
        plain(sink=zeros(4)),
        "sink has dtype float16, expected float32: it is a logit, as lse "
        "is; convert it",
    ),
    "a flag as a length": (
        plain(cache_seqlens=True),
        "cache_seqlens is True of type bool, expected an int",
    ),
    "rotary_interleaved": (
        rotated(rotary_interleaved=1),
        "rotary_interleaved is 1 of type int, expected True or False",
    ),
    "max_seqlen_q": (
        packed(max_seqlen_q=1.0),
        "max_seqlen_q is 1.0 of type float, expected an int",
    ),
    "window": (
        plain(window=3),
        "window is 3 of type int, expected (left, right), each an int, or "
        "None for no bound: pass (3, 0) for keys before the query",
    ),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    given, text = DTYPES[name]
    assert complaint(DTypeError, given) == text


def test_no_array():
    given = plain(cache_seqlens=3.0)
    assert complaint(DTypeError, given) == (
        "cache_seqlens is 3.0 of type float, expected an int or an array of "
        "integers: pass int(cache_seqlens)"
    )


# Shapes ----------------------------------------------------------------------

SHAPES = {
    "rank of q": (
        plain(q=zeros(3, 4, 8)),
        "k_cache has slots 2, expected 1, the batch: without "
        "cache_batch_idx, sequence b is in slot b (q (1, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), k_cache (2, 10, 2, 8) is (slots, capacity, "
        "heads, head_dim))",
    ),
    "q of five axes": (
        plain(q=zeros(1, 2, 3, 4, 8)),
        "q has 5 axes, expected 2, 3 or 4 (layout is (seqlen, head_dim), "
        "(seqlen, heads, head_dim) or (batch, seqlen, heads, head_dim))",
    ),
    "rank of packed q": (
        packed(q=zeros(*Q)),
        "q has 4 axes, expected 3 as cu_seqlens_q is given (layout is "
        "(total_q, heads, head_dim))",
    ),
    "rank of a cache": (
        plain(k_cache=zeros(10, 2, 8)),
        "k_cache has 3 axes, expected 4 as q has 4 (q (2, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), k_cache (10, 2, 8) is (slots, capacity, "
        "heads, head_dim))",
    ),
    "rank of k_new": (
        growing(k_new=zeros(2, 2, 8)),
        "k_new has 3 axes, expected 4 as q has 4 (q (2, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), k_new (2, 2, 8) is (batch, seqlen, heads, "
        "head_dim))",
    ),
    "head_dim of k_cache": (
        plain(k_cache=zeros(2, 10, 2, 9)),
        "k_cache has head_dim 9, expected 8 as in q (q (2, 3, 4, 8) is "
        "(batch, seqlen, heads, head_dim), k_cache (2, 10, 2, 9) is (slots, "
        "capacity, heads, head_dim))",
    ),
    "heads": (
        plain(q=zeros(2, 3, 5, 8)),
        "q has heads 5, expected a multiple of k_cache's 2: each key head "
        "serves a group of query heads of the same size (q (2, 3, 5, 8) is "
        "(batch, seqlen, heads, head_dim), k_cache (2, 10, 2, 8) is (slots, "
        "capacity, heads, head_dim))",
    ),
    "capacity of v_cache": (
        plain(v_cache=zeros(2, 9, 2, 8)),
        "v_cache has capacity 9, expected 10 as in k_cache (k_cache (2, 10, "
        "2, 8) is (slots, capacity, heads, head_dim), v_cache (2, 9, 2, 8) is "
        "(slots, capacity, heads, head_dim))",
    ),
    "page_size of v_cache": (
        {**paged(), "v_cache": zeros(6, 5, 2, 8)},
        "v_cache has page_size 5, expected 4 as in k_cache (k_cache (6, 4, 2, "
        "8) is (pages, page_size, heads, head_dim), v_cache (6, 5, 2, 8) is "
        "(pages, page_size, heads, head_dim))",
    ),
    "no page_size": (
        {**paged(), "k_cache": zeros(6, 0, 2, 8),
         "v_cache": zeros(6, 0, 2, 8)},
        "k_cache has page_size 0, expected at least 1 (k_cache (6, 0, 2, 8) "
        "is (pages, page_size, heads, head_dim))",
    ),
    "slots": (
        plain(k_cache=zeros(3, 10, 2, 8), v_cache=zeros(3, 10, 2, 8)),
        "k_cache has slots 3, expected 2, the batch: without "
        "cache_batch_idx, sequence b is in slot b (q (2, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), k_cache (3, 10, 2, 8) is (slots, capacity, "
        "heads, head_dim))",
    ),
    "page_table": (
        {**paged(), "page_table": ints(3, 3)},
        "page_table has shape (3, 3), expected (batch, max_pages) with batch "
        "2 as in q",
    ),
    "axes of page_table": (
        {**paged(), "page_table": ints(2)},
        "page_table has shape (2,), expected (batch, max_pages) with batch 2 "
        "as in q",
    ),
    "cache_seqlens": (
        plain(cache_seqlens=ints(3)),
        "cache_seqlens has shape (3,), expected (batch,) with batch 2 as in q",
    ),
    "cache_seqlens of packed q": (
        packed(cache_seqlens=ints(3)),
        "cache_seqlens has shape (3,), expected (batch,) with batch 2 as in "
        "cu_seqlens_q",
    ),
    "cache_batch_idx": (
        plain(cache_batch_idx=ints()),
        "cache_batch_idx has shape (), expected (batch,) with batch 2 as in q",
    ),
    "cu_seqlens_q": (
        packed(cu_seqlens_q=ints(0)),
        "cu_seqlens_q has shape (0,), expected (sequences + 1,): it holds the "
        "offset of each sequence's first token, then the end of the last",
    ),
    "batch of k_new": (
        growing(k_new=zeros(3, 2, 2, 8), v_new=zeros(3, 2, 2, 8)),
        "k_new has batch 3, expected 2 as in q (q (2, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), k_new (3, 2, 2, 8) is (batch, seqlen, "
        "heads, head_dim))",
    ),
    "heads of k_new": (
        growing(k_new=zeros(2, 2, 4, 8)),
        "k_new has heads 4, expected 2 as in k_cache (k_cache (2, 10, 2, 8) "
        "is (slots, capacity, heads, head_dim), k_new (2, 2, 4, 8) is (batch, "
        "seqlen, heads, head_dim))",
    ),
    "head_dim of v_new": (
        growing(v_new=zeros(2, 2, 2, 7)),
        "v_new has head_dim 7, expected 8 as in v_cache (v_cache (2, 10, 2, "
        "8) is (slots, capacity, heads, head_dim), v_new (2, 2, 2, 7) is "
        "(batch, seqlen, heads, head_dim))",
    ),
    "tokens of v_new": (
        growing(v_new=zeros(2, 1, 2, 8)),
        "v_new has seqlen 1, expected 2 as in k_new (k_new (2, 2, 2, 8) is "
        "(batch, seqlen, heads, head_dim), v_new (2, 1, 2, 8) is (batch, "
        "seqlen, heads, head_dim))",
    ),
    "tokens of packed k_new": (
        packed(k_new=zeros(5, 2, 8), v_new=zeros(5, 2, 8), cache_seqlens=0),
        "k_new has total_q 5, expected 6 as in q (q (6, 4, 8) is (total_q, "
        "heads, head_dim), k_new (5, 2, 8) is (total_q, heads, head_dim))",
    ),
    "more new tokens than room": (
        growing(k_new=zeros(2, 11, 2, 8), v_new=zeros(2, 11, 2, 8)),
        "k_new has seqlen 11, expected at most 10, the capacity of a sequence "
        "(k_cache (2, 10, 2, 8) is (slots, capacity, heads, head_dim), k_new "
        "(2, 11, 2, 8) is (batch, seqlen, heads, head_dim))",
    ),
    "out": (
        plain(out=zeros(2, 2, 4, 8)),
        "out has seqlen 2, expected 3 as in q (q (2, 3, 4, 8) is (batch, "
        "seqlen, heads, head_dim), out (2, 2, 4, 8) is (batch, seqlen, heads, "
        "head_dim))",
    ),
    "scale of pages": (
        float8(k_scale=zeros(2, 2, dtype=np.float32)),
        "k_scale has shape (2, 2), expected (2,) as in k_cache (layout is "
        "(heads,))",
    ),
    "alibi_slopes": (
        plain(alibi_slopes=zeros(3, dtype=np.float32)),
        "alibi_slopes has shape (3,), expected (2, 4) or (4,) as in q (layout "
        "is (batch, heads))",
    ),
    "sink": (
        plain(sink=zeros(2, 4, dtype=np.float32)),
        "sink has shape (2, 4), expected (4,) as in q (layout is (heads,))",
    ),
    "columns of the tables": (
        rotated(9, 5),
        "rotary_cos has 5 columns, expected at most 4: rotary_dim is twice as "
        "many, and at most q's head_dim 8 (q (2, 3, 4, 8), rotary_cos (9, 5))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    given, text = SHAPES[name]
    assert complaint(ShapeError, given) == text


def test_scales_of_pages():
    scale = zeros(5, 2, dtype=np.float32)
    caches = {name: zeros(*PAGES, dtype=FLOAT8)
              for name in ("k_cache", "v_cache")}  # fmt: skip
    given = {**paged(), **caches, "k_scale": scale, "v_scale": scale[0]}
    assert complaint(ShapeError, given) == (
        "k_scale has shape (5, 2), expected (2,) or (6, 2) as in k_cache "
        "(layout is (heads,) or (pages, heads))"
    )
    given["k_scale"] = zeros(6, 2, dtype=np.float32)
    checked = call(given)
    assert checked.problem.kvcache.scales == "page"
    layouts = checked.signature.options
    assert layouts["v_scale"].shape == (6, 2)
    assert layouts["v_scale"].strides == (0, 4)


@pytest.mark.parametrize(("name", "most"), [("q", 576), ("v_cache", 512)])
def test_wide_heads(name, most):
    wide = zeros(*plain()[name].shape[:3], most + 1)
    given = plain(**{name: wide})
    if name == "q":
        given["k_cache"] = zeros(*CACHE[:3], most + 1)
    assert complaint(UnsupportedError, given).startswith(
        f"{name} has head_dim {most + 1}, expected at most {most}"
    )


def test_a_capacity_beyond_32_bits():
    table = np.broadcast_to(ints(1), (2, 2**29))
    given = {**paged(), "page_table": table}
    assert complaint(UnsupportedError, given).startswith(
        "k_cache has a capacity of 2147483648 tokens a sequence, expected at "
        "most 1073740799: kernels compute the ends of a window in 32 bits"
    )


# Values ----------------------------------------------------------------------


def array(*numbers):
    return np.array(numbers, np.int32)


PAGED_NEW = {**growing(), **without(paged(), "q")}
VALUES = {
    "a negative length": (
        plain(cache_seqlens=array(1, -1)),
        "cache_seqlens[1] is -1, expected 0 to 10: the caches hold 10 tokens "
        "a sequence",
    ),
    "a length beyond the capacity": (
        plain(cache_seqlens=array(11, 1)),
        "cache_seqlens[0] is 11, expected 0 to 10: the caches hold 10 tokens "
        "a sequence",
    ),
    "no room": (
        growing(cache_seqlens=array(8, 9)),
        "cache_seqlens[1] is 9, expected 0 to 8: the caches hold 10 tokens a "
        "sequence, and 2 are appended",
    ),
    "no room, of an int": (
        growing(cache_seqlens=9),
        "cache_seqlens is 9, expected 0 to 8: the caches hold 10 tokens a "
        "sequence, and 2 are appended",
    ),
    "a negative int": (
        plain(cache_seqlens=np.int64(-2)),
        "cache_seqlens is -2, expected 0 to 10: the caches hold 10 tokens a "
        "sequence",
    ),
    "no room for packed tokens": (
        packed(k_new=zeros(6, 2, 8), v_new=zeros(6, 2, 8), cache_seqlens=6,
               cu_seqlens_q=array(0, 1, 6)),
        "cache_seqlens is 6, expected 0 to 5: the caches hold 10 tokens a "
        "sequence, and 5 are appended",
    ),
    "a slot": (
        plain(cache_batch_idx=array(0, 2)),
        "cache_batch_idx[1] is 2, expected 0 to 1: the slots of k_cache",
    ),
    "a negative slot": (
        plain(cache_batch_idx=array(-1, 0)),
        "cache_batch_idx[0] is -1, expected 0 to 1: the slots of k_cache",
    ),
    "left padding": (
        plain(cache_leftpad=array(0, -3)),
        "cache_leftpad[1] is -3, expected 0 to 2147483647: it counts tokens",
    ),
    "a page": (
        {**PAGED_NEW, "page_table": array([0, 1, 6], [2, 6, 6])},
        "page_table[1, 1] is 6, expected 0 to 5, the pages of k_cache: "
        "sequence 1 has 7 tokens, and a page holds 4",
    ),
    "a negative page": (
        {**paged(), "page_table": array([0, 1, -1], [2, 3, 4])},
        "page_table[0, 2] is -1, expected 0 to 5, the pages of k_cache: "
        "sequence 0 has 12 tokens, and a page holds 4",
    ),
    "a slot of two that append": (
        growing(cache_batch_idx=array(1, 1), cache_seqlens=array(3, 4)),
        "cache_batch_idx[1] is 1, as is cache_batch_idx[0], and token 4 of "
        "sequence 1 is appended to the row of token 4 of sequence 0, expected "
        "a row for each: give one of them another slot",
    ),
    "a page of two that append": (
        {**PAGED_NEW, "page_table": array([0, 1, 5], [2, 1, 5])},
        "page_table[1, 1] is 1, as is page_table[0, 1], and token 5 of "
        "sequence 1 is appended to the row of token 5 of sequence 0, expected "
        "a row for each: give one of them another page",
    ),
    "offsets": (
        packed(cu_seqlens_q=array(0, 4, 3)),
        "cu_seqlens_q[2] is 3, expected at least 4, the one before",
    ),
    "a longer sequence": (
        packed(cu_seqlens_q=array(0, 1, 6), max_seqlen_q=4),
        "cu_seqlens_q[2] is 6, expected at most 5: no sequence is longer than "
        "max_seqlen_q",
    ),
    "a position of a key": (
        rotated(6, 4),
        "cache_seqlens is 5, and tokens up to position 6 are rotated, "
        "expected positions of 0 to 5: rotary_cos has 6 rows",
    ),
    "a position of a query": (
        rotated(7, 4, causal=True, cache_seqlens=array(1, 5)),
        "cache_seqlens[1] is 5, and tokens up to position 7 are rotated, "
        "expected positions of 0 to 6: rotary_cos has 7 rows",
    ),
    "scale": (
        plain(scale=1e39),
        "scale is 1e+39, expected at most 1e+38 in magnitude: scores of "
        "float16 arrays are float32",
    ),
    "num_splits": (
        plain(num_splits=0),
        "num_splits is 0, expected 1 to 128: it counts the parts into which "
        "the keys of a head are cut",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    """Nothing is written after an error."""
    given, text = VALUES[name]
    caches = {x: np.ones_like(given[x]) for x in ("k_cache", "v_cache")}
    out = np.ones_like(given["q"])
    assert complaint(ValueRangeError, {**given, **caches, "out": out}) == text
    for x in (*caches.values(), out):
        assert_all(x, 1, "x")


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1])
def test_pages_without_a_token_are_ignored(bad):
    table = array([0, 1, bad], [2, 3, bad])
    cuflash.forward_kvcache(**{**PAGED_NEW, "page_table": table})


def test_sequences_may_share_what_they_do_not_append_to():
    """Pages; and slots of which each writes its own rows."""
    table = array([0, 1, 5], [0, 3, 5])
    given = {**PAGED_NEW, "page_table": table, "cache_seqlens": array(4, 5)}
    cuflash.forward_kvcache(**given)
    cuflash.forward_kvcache(**plain(cache_batch_idx=array(1, 1)))
    slots, lengths = array(1, 1), array(2, 4)
    cuflash.forward_kvcache(
        **growing(cache_batch_idx=slots, cache_seqlens=lengths)
    )


def test_left_padding_may_exceed_the_length():
    given = plain(cache_leftpad=array(0, 99), return_lse=True)
    out, lse = cuflash.forward_kvcache(**given)
    assert_all(out[1], 0, "out[1]")
    assert_all(lse[1], -np.inf, "lse[1]")
    assert_finite(lse[0], "lse[0]")


class OnDevice:
    """An array whose values must be fetched."""

    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def get(self):
        return self.values


def test_values_on_a_device_are_read_only_to_check_them(monkeypatch):
    checked = call(plain(cache_seqlens=array(1, -1)))
    lengths = OnDevice(checked.options["cache_seqlens"])
    checked.options["cache_seqlens"] = lengths
    with pytest.raises(ValueRangeError, match=r"cache_seqlens\[1\] is -1"):
        kvcache_values.values(checked)
    monkeypatch.delenv("CUFLASH_CHECK", raising=False)
    assert not cuflash.api.arrays.reads_values(lengths)
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    assert cuflash.api.arrays.reads_values(lengths)


# Memory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [("k_cache", "k_new"), ("v_cache", "v_new"), ("out", "the result")],
)
def test_read_only_arrays(name, what):
    given = growing(out=zeros(*Q))
    given[name].flags.writeable = False
    assert complaint(ValueRangeError, given) == (
        f"{name} is read-only (numpy.ndarray {given[name].shape}), expected a "
        f"writable array: it receives {what}"
    )


def test_read_only_caches_that_are_not_written():
    given = plain()
    for name in ("k_cache", "v_cache"):
        given[name].flags.writeable = False
    cuflash.forward_kvcache(**given)


@pytest.mark.parametrize("written", ["k_cache", "v_cache", "out"])
@pytest.mark.parametrize("other", ["q", "k_new", "cache_seqlens"])
def test_memory_that_is_written_is_apart(written, other):
    given = growing(out=zeros(*Q), cache_seqlens=ints(2))
    room = given[written].view(np.uint8).reshape(-1)
    nbytes = given[other].nbytes
    shared = room[-nbytes:].view(given[other].dtype)
    given[other] = shared.reshape(given[other].shape)
    assert complaint(ValueRangeError, given) == (
        f"{written} shares memory with {other}, expected separate memory: "
        f"{other} is read while {written} is written"
    )


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_out_and_a_cache_are_both_written(cache):
    given = growing()
    given["out"] = given[cache].reshape(-1)[: zeros(*Q).size].reshape(Q)
    assert complaint(ValueRangeError, given) == (
        f"{cache} shares memory with out, expected separate memory: both are "
        "written"
    )


def test_caches_that_share_memory():
    given = growing()
    both = zeros(2, 10, 2, 9)
    given |= {"k_cache": both[..., :8], "v_cache": both[..., 1:]}
    assert complaint(ValueRangeError, given).startswith(
        "k_cache shares memory with v_cache,"
    )
    given = without(given, "k_new", "v_new")
    cuflash.forward_kvcache(**given)  # nothing is written


def test_values_that_are_columns_of_keys():
    """New tokens are keys, whose columns v_new may be."""
    given = without(growing(), "v_cache", "v_new") | {"head_dim_v": 5}
    assert cuflash.forward_kvcache(**given).shape == (2, 3, 4, 5)
    given["v_cache"] = given["k_cache"][..., : given.pop("head_dim_v")]
    cuflash.forward_kvcache(**given)
    cuflash.forward_kvcache(**given, v_new=given["k_new"][..., :5])
    assert complaint(ValueRangeError, {**given, "v_new": given["k_new"] + 1}
    ).startswith(
        "v_new is given with a v_cache that is k_cache's first columns, "
    )  # fmt: skip


def test_values_in_keys_have_their_scale():
    rows, new = zeros(1, 4, 1, 16, dtype=FLOAT8), zeros(1, 1, 1, 16) + 1
    scale = np.ones(1, np.float32)
    given = {
        "q": new, "k_cache": rows, "v_cache": rows[..., :8], "k_new": new,
        "v_new": new[..., :8], "cache_seqlens": 0, "k_scale": scale,
    }  # fmt: skip
    out = cuflash.forward_kvcache(**given, v_scale=scale)
    assert_all(out, 1, "out")
    assert complaint(
        ValueRangeError, {**given, "v_scale": 2 * scale}
    ).startswith("v_scale is given with a v_cache that is k_cache's first")


@pytest.mark.parametrize(
    ("changes", "error", "start"),
    [
        ({}, ValueRangeError, "v_cache is None, expected an array, or head"),
        ({"head_dim_v": 9}, ValueRangeError, "head_dim_v is 9, expected 1 to"),
        ({"head_dim_v": 2.0}, DTypeError, "head_dim_v is 2.0 of type float,"),
        ({"head_dim_v": 4, "v_new": zeros(2, 2, 2, 4)}, ValueRangeError,
         "v_new is given without v_cache, expected None: values are"),
        ({"head_dim_v": 8, "v_cache": zeros(*CACHE)}, ValueRangeError,
         "head_dim_v is given with v_cache, expected one of them"),
    ],
)  # fmt: skip
def test_head_dim_of_values_in_keys(changes, error, start):
    given = without(growing(), "v_cache", "v_new") | changes
    assert complaint(error, given).startswith(start)


def test_caches_may_lie_between_each_other():
    both = zeros(6, 2, 4, 2, 8)
    caches = {"k_cache": both[:, 0], "v_cache": both[:, 1]}
    given = {**PAGED_NEW, **caches, "page_table": array([0, 1], [2, 3])}
    cuflash.forward_kvcache(**given)


def test_a_cache_whose_elements_overlap():
    slot = zeros(1, 10, 2, 8)
    given = growing(k_cache=np.lib.stride_tricks.as_strided(
        slot, CACHE, (0, *slot.strides[1:])))  # fmt: skip
    assert complaint(ValueRangeError, given).startswith(
        "k_cache has elements that share memory with each other"
    )


# What is returned ------------------------------------------------------------


def test_the_problem_holds_every_argument():
    """Also that a length is not part of it."""
    given = rotated(
        scale=0.5, causal=True, window=(3, 5), softcap=2.0, num_splits=2,
        alibi_slopes=np.ones(4, np.float32), sink=np.ones(4, np.float32),
        return_lse=True, rotary_interleaved=True,
    )  # fmt: skip
    checked = call(given)
    rotary = Rotary(8, 9, "float32", None, True, False)
    assert checked.problem == Problem(
        "kvcache", "float16", 2, 3, 10, 4, 2, 8, 8, 0.5, True,
        num_splits=2, window=(3, None), softcap=2.0, alibi_slopes=True,
        sink=True,
        kvcache=KVCache("float16", None, 2, seqlen_new=2, total_q=6,
                        rotary=rotary),
    )  # fmt: skip
    assert checked.return_lse and checked.cache_seqlens == 5
    assert call({**given, "cache_seqlens": 6}).signature is checked.signature


def test_the_problem_of_pages():
    given = {**paged(cache_seqlens=ints(2)), "q": zeros(6, 4, 8),
             "k_new": zeros(6, 2, 8), "v_new": zeros(6, 2, 8),
             "cu_seqlens_q": ints(3), "max_seqlen_q": 4}  # fmt: skip
    checked = call(given)
    p = checked.problem
    assert (p.batch, p.seqlen_q, p.seqlen_k) == (2, 4, 12)
    assert p.kvcache == KVCache(
        "float16", 4, 6, max_pages=3, seqlen_new=4, lengths=True,
        packed_queries=True, packed_new=True, total_q=6,
    )  # fmt: skip
    layouts = checked.signature.layouts
    assert layouts["q"].shape == (1, 6, 4, 8)
    assert layouts["k_new"].shape == (1, 6, 2, 8)
    assert layouts["k_cache"].shape == checked.arrays["k_cache"].shape == PAGES
    assert checked.arrays["v_new"].shape == (1, 6, 2, 8)
    assert set(checked.signature.options) == {
        "cache_seqlens", "cu_seqlens_q", "page_table",
    }  # fmt: skip


def test_the_default_length_is_the_capacity():
    checked = call(plain())
    assert checked.cache_seqlens == 10
    assert not checked.problem.kvcache.lengths


def test_bytes_are_float8():
    given = float8()
    as_bytes = {x: given[x].view(np.uint8) for x in ("k_cache", "v_cache")}
    for changed in (as_bytes, {"k_cache": as_bytes["k_cache"]}):
        problem = call({**given, **changed}).problem
        assert problem == call(given).problem
        assert problem.kvcache.dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("window", "plain_one", "rotated_one"),
    [
        ((None, 0), (True, (None, None)), (True, (None, None))),
        ((9, None), (False, (None, None)), (False, (9, None))),
        ((2**40, 2**40), (False, (None, None)), (False, (10, 3))),
        ((8, 1), (False, (8, 1)), (False, (8, 1))),
    ],
)
def test_windows_that_mask_nothing(window, plain_one, rotated_one):
    """They still tell how queries are rotated."""
    for make, want in ((growing, plain_one), (rotated, rotated_one)):
        p = call(make(window=window)).problem
        assert (p.causal, p.window) == want


@pytest.mark.parametrize("make", [plain, paged, growing, packed, rotated])
def test_a_call_like_one_before_is_one_look_up(make):
    first = call(make(causal=True))
    with (
        mock.patch.object(
            validate_kvcache, "CacheArrays", side_effect=Exception
        ),
        mock.patch.object(validate_kvcache, "Others", side_effect=Exception),
    ):
        assert call(make(causal=True)).signature is first.signature


def test_out_is_returned():
    out = zeros(*Q)
    assert cuflash.forward_kvcache(**plain(out=out)) is out
