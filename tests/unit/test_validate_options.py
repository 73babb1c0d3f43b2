"""The text of every error about masks and score modifications."""

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
from helpers.compare import assert_all

Q, K, V = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)
PAIRS = (2, 4, 5, 7)


def f4(*shape):
    return np.zeros(shape, np.float32)


def i4(*values):
    return np.array(values, np.int32)


def ids(*shape):
    return np.zeros(shape, np.int32)


def complaint(error, shapes=(Q, K, V), **options):
    """Return the text of the error that a good call with options raises."""
    with pytest.raises(CuflashError) as caught:
        cuflash.forward(*(f4(*shape) for shape in shapes), **options)
    assert caught.type is error
    return str(caught.value)


def of_backward(**options):
    """Return the text of the ValueRangeError that backward raises."""
    q, k, v = f4(*Q), f4(*K), f4(*V)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    with pytest.raises(ValueRangeError) as caught:
        cuflash.backward(out, q, k, v, out, lse, **options)
    return str(caught.value)


# Numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ("ab", "'ab' of type str"),
        ((1, 2, 3), "of type tuple"),
        (np.zeros(2), "of type numpy.ndarray"),
    ],
)
def test_window_that_is_no_pair(window, said):
    assert complaint(DTypeError, window=window) == (
        f"window is {said}, expected (left, right), each an int, or None for "
        "no bound"
    )


def test_window_of_one_number():
    assert complaint(DTypeError, window=3) == (
        "window is 3 of type int, expected (left, right), each an int, or "
        "None for no bound: pass (3, 0) for keys before the query"
    )


def test_seed_that_is_a_generator():
    seed = np.random.default_rng(0)
    text = complaint(DTypeError, dropout=0.1, seed=seed)
    assert text.endswith("expected an int: pass int(seed.integers(2**63))")


@pytest.mark.parametrize("bound", [1.5, "1", True])
def test_window_of_no_ints(bound):
    assert complaint(DTypeError, window=(None, bound)) == (
        f"window has a bound {bound!r} of type {type(bound).__name__}, "
        "expected an int, or None for no bound"
    )


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-1, -1)])
def test_window_without_room(window):
    """-1, flash-attn's value for no bound."""
    assert complaint(ValueRangeError, window=window) == (
        f"window is {window}, expected bounds of at least 0, or None for no "
        "bound: a query sees left keys before its own position, the key at "
        "it, and right keys after it"
    )


@pytest.mark.parametrize("softcap", [-1.0, 1e-31, 1e31])
def test_softcap_out_of_range(softcap):
    assert complaint(ValueRangeError, softcap=softcap) == (
        f"softcap is {softcap}, expected 1e-30 to 1e+30, or 0 or None for "
        "none: scores stay between -softcap and softcap"
    )


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2])
def test_dropout_that_is_no_probability(dropout):
    assert complaint(ValueRangeError, dropout=dropout, seed=1) == (
        f"dropout is {dropout}, expected at least 0 and less than 1: it is "
        "the probability that a pair is dropped"
    )


@pytest.mark.parametrize("name", ["softcap", "dropout"])
def test_not_a_real_number(name):
    for value, said in (("1", "'1' of type str"), (True, "True of type bool")):
        assert complaint(DTypeError, **{name: value}) == (
            f"{name} is {said}, expected a real number"
        )


@pytest.mark.parametrize("name", ["softcap", "dropout"])
@pytest.mark.parametrize("value", [np.inf, np.nan, 10**400])
def test_not_finite(name, value):
    assert complaint(ValueRangeError, **{name: value}) == (
        f"{name} is {value}, expected a finite number"
    )


def test_dropout_without_a_seed():
    assert complaint(ValueRangeError, dropout=0.5) == (
        "seed is None, expected an int because dropout is given: forward and "
        "backward must drop the same pairs"
    )


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_of_more_than_64_bits(seed):
    assert complaint(ValueRangeError, seed=seed) == (
        f"seed is {seed}, expected 0 to {2**64 - 1}"
    )


def test_seed_that_is_no_int():
    assert complaint(DTypeError, seed=1.0) == (
        "seed is 1.0 of type float, expected an int"
    )


@pytest.mark.parametrize("name", ["return_dbias", "return_dsink"])
def test_gradients_of_missing_options(name):
    needed = name.removeprefix("return_d")
    assert of_backward(**{name: True}) == (
        f"{name} is given without {needed}, expected {needed} too: neither "
        "has an effect alone"
    )


def test_gradients_that_are_not_wanted_need_nothing():
    q, k, v = f4(*Q), f4(*K), f4(*V)
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    given = {"return_dbias": np.False_, "return_dsink": np.False_}
    assert len(cuflash.backward(out, q, k, v, out, lse, **given)) == 3


# Arrays --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "alibi_slopes",
            np.zeros(4),
            "float32: slopes are float32, or float64 with float64 arrays; "
            "convert it",
        ),
        ("sink", np.zeros(4), "float32: it is a logit, as lse is; convert it"),
        (
            "bias",
            np.zeros(PAIRS),
            "float32: it is added to scores; convert it",
        ),
        (
            "bias",
            np.zeros(PAIRS, bool),
            "float32: it is added to scores; pass a boolean array as mask",
        ),
        (
            "mask",
            np.ones(PAIRS, np.uint8),
            "bool: True keeps a pair; pass an additive mask as bias; or pass "
            "mask != 0",
        ),
    ],
)
def test_dtype(name, given, said):
    assert complaint(DTypeError, **{name: given}) == (
        f"{name} has dtype {given.dtype}, expected {said}"
    )


def test_dtype_of_segment_ids():
    given = {"segment_ids_q": np.zeros((2, 5)), "segment_ids_k": ids(7)}
    assert complaint(DTypeError, **given) == (
        "segment_ids_q has dtype float64, expected an integer dtype: convert "
        "segment_ids_q to int32"
    )


def test_ids_beyond_int32():
    wide = ids(7).astype(np.int64) + 2**31
    given = {"segment_ids_q": ids(5), "segment_ids_k": wide}
    assert complaint(ValueRangeError, **given) == (
        "segment_ids_k holds 2147483648, expected -2147483648 to 2147483647: "
        "kernels read segment_ids_k as int32"
    )


def test_bias_of_half_precision_calls_may_be_float32():
    q, k, v = (np.zeros(shape, np.float16) for shape in (Q, K, V))
    cuflash.forward(q, k, v, bias=f4(7))
    with pytest.raises(DTypeError, match="expected float16 or float32: it"):
        cuflash.forward(q, k, v, bias=np.zeros(7))


@pytest.mark.parametrize("shape", [(), (2,), (4, 2), (1, 2, 4)])
def test_shape_of_slopes(shape):
    assert complaint(ShapeError, alibi_slopes=f4(*shape)) == (
        f"alibi_slopes has shape {shape}, expected (2, 4) or (4,) as in q "
        "(layout is (batch, heads))"
    )


@pytest.mark.parametrize("shape", [(), (2,), (2, 4)])
def test_shape_of_sink(shape):
    assert complaint(ShapeError, sink=f4(*shape)) == (
        f"sink has shape {shape}, expected (4,) as in q (layout is (heads,))"
    )


def test_a_mask_of_keys_with_too_few_axes():
    text = complaint(ShapeError, mask=np.ones((PAIRS[0], PAIRS[3]), bool))
    assert text.endswith("if it tells of keys, pass mask[:, None, None])")


@pytest.mark.parametrize("shape", [(5,), (3, 5, 7), (1, 2, 4, 5, 7)])
def test_shape_of_bias(shape):
    assert complaint(ShapeError, bias=f4(*shape)) == (
        f"bias has shape {shape}, expected one that broadcasts to {PAIRS} "
        "(layout is (batch, heads, seqlen_q, seqlen_k))"
    )


def test_bias_of_all_heads_without_their_axis():
    text = complaint(ShapeError, bias=f4(2, 5, 7))
    assert text.endswith("the same for all heads, pass bias[:, None])")


@pytest.mark.parametrize("shape", [(7,), (5, 2), (1, 5)])
def test_shape_of_segment_ids(shape):
    given = {"segment_ids_q": ids(*shape), "segment_ids_k": ids(2, 7)}
    assert complaint(ShapeError, **given) == (
        f"segment_ids_q has shape {shape}, expected (2, 5) or (5,) as in q "
        "(layout is (batch, seqlen))"
    )


@pytest.mark.parametrize("name", ["segment_ids", "cu_seqlens"])
@pytest.mark.parametrize("sides", ["qk", "kq"])
def test_one_of_two(name, sides):
    here, other = (f"{name}_{side}" for side in sides)
    assert complaint(ValueRangeError, **{here: ids(5)}) == (
        f"{here} is given without {other}, expected {other} too: neither "
        "has an effect alone"
    )


def test_array_on_no_device():
    assert complaint(DTypeError, sink=[0.0] * 4) == (
        "sink is of type list, expected an array: pass np.asarray(sink), or "
        "of arrays on a CUDA device cupy.asarray(sink)"
    )


def test_out_that_shares_memory_with_bias():
    memory = f4(2, 5, 4, 7)
    text = complaint(
        ValueRangeError, bias=memory.swapaxes(1, 2), out=memory[..., :6]
    )
    assert text.startswith("out shares memory with bias, expected separate")


# Packed sequences ----------------------------------------------------------

PACKED = (5, 4, 8), (7, 2, 8), (7, 2, 6)


def packed(q=(0, 2, 5), k=(0, 3, 7), **others):
    return {"cu_seqlens_q": i4(*q), "cu_seqlens_k": i4(*k), **others}


def test_packed_sequences_have_three_axes():
    assert complaint(ShapeError, **packed()) == (
        "q has 4 axes, expected 3 as cu_seqlens_q is given (layout is "
        "(total_q, heads, head_dim)): of batch 1, pass q[0], k[0] and v[0]"
    )


def test_offsets_of_other_sequences():
    assert complaint(ShapeError, PACKED, **packed(k=(0, 7))) == (
        "cu_seqlens_k has shape (2,), expected (3,) as cu_seqlens_q: each "
        "sequence has queries and keys"
    )


@pytest.mark.parametrize("shape", [(), (2,), (2, 4), (4, 3), (1, 4)])
def test_shape_of_slopes_of_sequences(shape):
    given = packed(q=(0, 2, 2, 5), k=(0, 3, 4, 7), alibi_slopes=f4(*shape))
    assert complaint(ShapeError, PACKED, **given) == (
        f"alibi_slopes has shape {shape}, expected (3, 4) or (4,) as in q and "
        "cu_seqlens_q (layout is (sequences, heads))"
    )


def test_slopes_of_offsets_that_are_none():
    given = packed(q=(), alibi_slopes=f4(2, 4))
    text = complaint(ShapeError, PACKED, **given)
    assert text.startswith("cu_seqlens_q has shape (0,), expected")


def test_offsets_of_no_sequence():
    assert complaint(ShapeError, PACKED, **packed(q=())) == (
        "cu_seqlens_q has shape (0,), expected (sequences + 1,): it holds "
        "the offset of each sequence's first token, then the end of the last"
    )


@pytest.mark.parametrize("name", ["bias", "mask", "segment_ids_q"])
def test_options_that_packed_sequences_lack(name):
    given = {"bias": f4(7), "mask": np.ones(7, bool), "segment_ids_q": ids(5)}
    others = {name: given[name]}
    if name == "segment_ids_q":
        others["segment_ids_k"] = ids(7)
    assert complaint(UnsupportedError, PACKED, **packed(), **others) == (
        f"{name} is given with cu_seqlens_q, expected one of them: packed "
        "sequences do not support bias, mask or segment ids"
    )


def test_longest_of_no_packed_sequences():
    assert complaint(ValueRangeError, max_seqlen_q=3) == (
        "max_seqlen_q is given without cu_seqlens_q, expected cu_seqlens_q "
        "too: neither has an effect alone"
    )


BAD_OFFSETS = [
    ({"q": (1, 2, 5)}, "cu_seqlens_q[0] is 1, expected 0 (of lengths, pass "
     "cuflash.cu_seqlens(lengths))"),
    ({"q": (0, 3, 2)}, "cu_seqlens_q[2] is 2, expected at least 3, the one "
     "before"),
    ({"k": (0, 8, 9)}, "cu_seqlens_k[1] is 8, expected at most 7, the number "
     "of tokens"),
    ({"max_seqlen_k": 3}, "cu_seqlens_k[2] is 7, expected at most 6: no "
     "sequence is longer than max_seqlen_k"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), BAD_OFFSETS)
def test_bad_offsets_of_numpy_are_named(changes, text):
    assert complaint(ValueRangeError, PACKED, **packed(**changes)) == text


@pytest.mark.parametrize(("changes", "text"), BAD_OFFSETS)
def test_bad_offsets_of_numpy_are_named_by_backward(changes, text):
    q, k, v = (np.ones(shape, np.float32) for shape in PACKED)
    out, lse = cuflash.forward(q, k, v, **packed(), return_lse=True)
    with pytest.raises(ValueRangeError) as caught:
        cuflash.backward(out, q, k, v, out, lse, **packed(**changes))
    assert str(caught.value) == text


def test_bad_offsets_write_nothing():
    q, k, v = (np.ones(shape, np.float32) for shape in PACKED)
    out = np.full((5, 4, 6), 5, np.float32)
    with pytest.raises(ValueRangeError):
        cuflash.forward(q, k, v, out=out, **packed(q=(1, 2, 5)))
    assert_all(out, 5, "out")


def test_tokens_of_no_sequence_give_zeros():
    q, k, v = (np.ones(shape, np.float32) for shape in PACKED)
    given = packed(q=(0,), k=(0,))
    out, lse = cuflash.forward(q, k, v, **given, return_lse=True)
    assert_all(out, 0, "out")
    assert_all(lse, -np.inf, "lse")
    for gradient in cuflash.backward(out + 1, q, k, v, out, lse, **given):
        assert_all(gradient, 0, "gradient")
