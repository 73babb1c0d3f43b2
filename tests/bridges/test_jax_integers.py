"""Offsets and ids of any integer dtype, as JAX and NumPy arrays."""

import pytest

jax = pytest.importorskip("jax", reason="tests of cuflash.jax need it")

import numpy as np  # noqa: E402
from jax_data import assert_same, inputs, on_cpu, packed  # noqa: E402

from cuflash.errors import DTypeError, ValueRangeError  # noqa: E402
from cuflash.jax import attention  # noqa: E402

pytestmark = pytest.mark.slow


def offsets(kind, place):
    given = packed()
    cu = {n: place(given.pop(n).astype(kind))
          for n in ("cu_seqlens_q", "cu_seqlens_k")}  # fmt: skip
    return attention(*map(on_cpu, given.values()), **cu)


def ids(kind, place, shift=0):
    q, k = (place((np.arange(n) // 3 + shift).astype(kind)) for n in (5, 7))
    given = map(on_cpu, inputs().values())
    return attention(*given, segment_ids_q=q, segment_ids_k=k)


def unchanged(x):
    return x


@pytest.mark.parametrize("kind", ["int64", "uint8", "int16", "uint64"])
@pytest.mark.parametrize("call", [offsets, ids])
def test_any_integer_dtype(call, kind):
    """Of NumPy arrays without float64, and of JAX arrays with it."""
    expected = call("int32", unchanged)
    assert_same(call(kind, unchanged), expected)
    with jax.enable_x64(True):
        assert_same(call(kind, on_cpu), expected)


def test_numbers_that_do_not_fit_raise_before_the_call():
    words = "segment_ids_q holds 1099511627776, expected"
    with pytest.raises(ValueRangeError, match=words):
        ids("int64", unchanged, shift=2**40)
    with jax.enable_x64(True), pytest.raises(ValueRangeError, match=words):
        ids("int64", on_cpu, shift=2**40)


@pytest.mark.parametrize("call", [offsets, ids])
def test_other_dtypes_name_the_cure(call):
    with pytest.raises(DTypeError, match="expected an integer dtype: convert"):
        call("float32", unchanged)
