"""forward against the float64 reference, whatever the shape."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import cuflash
import strategies
from helpers import calls, expected
from helpers.backends import on_backends
from helpers.compare import assert_bitwise, assert_forward_matches
from helpers.data import inputs
from helpers.dtypes import lse_dtype


@on_backends
@given(data=st.data())
def test_is_attention(backend, data):
    case = data.draw(strategies.cases(backend))
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_backends
@given(data=st.data())
def test_results_are_arrays_of_the_same_kind(backend, data):
    case = data.draw(strategies.cases(backend, longest=70))
    q, k, v, _ = (backend.place(x) for x in inputs(case))
    out, lse = cuflash.forward(q, k, v, **case.call(), return_lse=True)
    assert type(out) is type(lse) is backend.array_type
    assert out.dtype == q.dtype and lse.dtype == lse_dtype(q.dtype)


@on_backends
@given(data=st.data())
def test_out_argument_gets_the_same_bits(backend, data):
    case = data.draw(strategies.cases(backend, longest=70))
    q, k, v, dout = (backend.place(x) for x in inputs(case))
    plain = cuflash.forward(q, k, v, **case.call())
    target = dout
    target[...] = np.nan
    result = cuflash.forward(q, k, v, **case.call(), out=target)
    assert result is target
    assert_bitwise(backend.fetch(target), backend.fetch(plain), "out")


@on_backends
@given(data=st.data())
def test_ranks_agree(backend, data):
    """2-D and 3-D inputs are the 4-D call with axes of one left out."""
    case = data.draw(strategies.cases(backend, longest=70))
    q, k, v, _ = (x[:1, :, :1] for x in inputs(case))
    out, lse = calls.forward(backend, case, q, k, v)
    out3, lse3 = calls.forward(backend, case, q[0], k[0], v[0])
    out2, lse2 = calls.forward(backend, case, *(x[0, :, 0] for x in (q, k, v)))
    assert_bitwise(out3, out[0], "3-D out")
    assert_bitwise(lse3, lse[0], "3-D lse")
    assert_bitwise(out2, out[0, :, 0], "2-D out")
    assert_bitwise(lse2, lse[0, 0], "2-D lse")
