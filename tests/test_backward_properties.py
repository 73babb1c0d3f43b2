"""backward against the float64 reference, whatever the shape."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import strategies
from helpers import calls, expected
from helpers.backends import on_backends
from helpers.compare import assert_bitwise, assert_gradients_match
from helpers.data import inputs
from helpers.heads import visible


@on_backends
@given(data=st.data(), deterministic=st.booleans())
def test_is_the_gradient(backend, data, deterministic):
    case = data.draw(strategies.cases(backend))
    q, k, v, dout = inputs(case)
    grads = calls.both(
        backend, case, q, k, v, dout, deterministic=deterministic
    )
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


@on_backends
@given(data=st.data())
def test_results_are_arrays_like_the_inputs(backend, data):
    case = data.draw(strategies.cases(backend, longest=70))
    q, k, v, dout = (backend.place(x) for x in inputs(case))
    out, lse = cuflash.forward(q, k, v, **case.call(), return_lse=True)
    grads = cuflash.backward(dout, q, k, v, out, lse, **case.call())
    for grad, like in zip(grads, (q, k, v), strict=True):
        assert type(grad) is backend.array_type
        assert grad.dtype == like.dtype and grad.shape == like.shape


@on_backends
@given(data=st.data())
def test_keys_that_nobody_sees_get_zero(backend, data):
    case = data.draw(strategies.cases(backend, longest=70))
    q, k, v, dout = inputs(case)
    _, dk, dv = calls.both(backend, case, q, k, v, dout)
    seen = visible(case.seqlen_q, case.seqlen_k, case.causal).any(axis=0)
    assert not dk[:, ~seen].any() and not dv[:, ~seen].any()


@on_backends
@given(data=st.data())
def test_twice_dout_gives_twice_the_gradients(backend, data):
    """Scaling by a power of two rounds nothing, so the bits must double."""
    dtypes = ("bfloat16", "float32", "float64")  # float16 has subnormals
    case = data.draw(strategies.cases(backend, dtypes, longest=70))
    q, k, v, dout = inputs(case)
    options = {"deterministic": True}
    once = calls.both(backend, case, q, k, v, dout, **options)
    twice = calls.both(backend, case, q, k, v, dout * 2, **options)
    for name, a, b in zip(("dq", "dk", "dv"), once, twice, strict=True):
        assert_bitwise(normal(b), normal(a * a.dtype.type(2)), name)


@on_backends
@given(data=st.data())
def test_ranks_agree(backend, data):
    case = data.draw(strategies.cases(backend, longest=70))
    arrays = [x[:1, :, :1] for x in inputs(case)]
    options = {"deterministic": True}
    four = calls.both(backend, case, *arrays, **options)
    three = calls.both(backend, case, *(x[0] for x in arrays), **options)
    two = calls.both(backend, case, *(x[0, :, 0] for x in arrays), **options)
    for name, a, b, c in zip("qkv", four, three, two, strict=True):
        assert_bitwise(b, a[0], f"3-D d{name}")
        assert_bitwise(c, a[0, :, 0], f"2-D d{name}")


def normal(array):
    """Put +0 for what is flushed or subnormal, where doubling rounds."""
    size = np.abs(np.asarray(array, np.float64))
    return np.where(size < 2.0**-120, array.dtype.type(0), array)
