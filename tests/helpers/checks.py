"""One call on a backend, held against the float64 reference."""

import cuflash

from . import calls, expected
from .compare import assert_forward_matches, assert_gradients_match
from .data import inputs


def check_forward(backend, case):
    """Of out and lse."""
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


def check_gradients(backend, case):
    """Of all gradients, from out and lse of the NumPy path."""
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(got, want, case)
