"""Offsets of lengths, segment ids of masks, rotary tables."""

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import DTypeError, ShapeError, ValueRangeError
from cuflash.reference import rotary
from helpers.compare import assert_allclose, assert_arrays_equal


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.uint8])
def test_offsets(kind):
    lengths = [3, 0, 5]
    lengths = (
        kind(lengths)
        if isinstance(kind(), (list, tuple))
        else (np.array(lengths, kind))
    )
    got = cuflash.cu_seqlens(lengths)
    assert got.dtype == np.int32 and got.tolist() == [0, 3, 3, 8]
    assert cuflash.cu_seqlens([]).tolist() == [0]


def test_offsets_pack_sequences():
    q = np.random.default_rng(0).standard_normal((8, 2, 8))
    offsets = cuflash.cu_seqlens([3, 5])
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    out = cuflash.forward(q, q, q, **packed)
    assert_arrays_equal(out[:3], cuflash.forward(*[q[:3]] * 3), "out[:3]")


@pytest.mark.parametrize("dtype", [bool, np.int64])
def test_segment_ids_hide_padding(dtype):
    q = np.random.default_rng(0).standard_normal((2, 5, 2, 8))
    mask = np.arange(5) < np.array([[3], [5]])
    ids = cuflash.segment_ids(mask.astype(dtype))
    assert ids.dtype == np.int32 and ids.shape == mask.shape
    other = q.copy()
    other[~mask] = 9.0
    options = {"segment_ids_q": ids, "segment_ids_k": ids}
    outs = [cuflash.forward(q, x, x, **options)[mask] for x in (q, other)]
    assert_arrays_equal(*outs, name="outs")


@pytest.mark.parametrize("dtype", ["float64", "float32", ml_dtypes.bfloat16])
def test_tables_are_those_of_the_reference(dtype):
    want = rotary.tables(7, 12, 100.0)
    for positions in (7, np.arange(7), [0, 1, 2, 3, 4, 5, 6]):
        got = cuflash.rotary_tables(positions, 12, 100.0, dtype=dtype)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == np.dtype(dtype)
            assert_arrays_equal(a, b.astype(dtype), "a")


def test_tables_of_positions_anywhere():
    cos, _ = cuflash.rotary_tables(np.array([0.5, 900]), 4)
    assert cos.dtype == np.float32
    want = np.cos([[0.5, 0.005], [900, 9]]).astype(np.float32)
    assert_allclose(cos, want, "cos", rtol=2**-23)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: cuflash.cu_seqlens([1.0]), DTypeError, "integer dtype"),
        (lambda: cuflash.cu_seqlens(3), DTypeError, "lengths is of type int"),
        (lambda: cuflash.cu_seqlens([[1]]), ShapeError, r"\(sequences,\)"),
        (lambda: cuflash.cu_seqlens([3, -1]), ValueRangeError, "-1 at least"),
        (lambda: cuflash.cu_seqlens([2**31]), ValueRangeError, "are int32"),
        (lambda: cuflash.segment_ids(np.ones(3)), DTypeError, "expected bool"),
        (lambda: cuflash.segment_ids([1]), DTypeError, "NumPy or CuPy array"),
        (lambda: cuflash.rotary_tables(4, 3), ValueRangeError, "even number"),
        (lambda: cuflash.rotary_tables(4, 4, 0), ValueRangeError, "base is"),
        (lambda: cuflash.rotary_tables(4.0, 4), DTypeError, "positions is of"),
        (lambda: cuflash.rotary_tables(np.eye(2), 4), ShapeError, "numbers"),
        (lambda: cuflash.rotary_tables(4, 4, dtype="int32"), DTypeError,
         "dtype is int32"),
    ],
)  # fmt: skip
def test_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
