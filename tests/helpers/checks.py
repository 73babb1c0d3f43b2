"""One call on a backend, compared with the float64 reference."""

import cuflash

from . import calls, expected
from .compare import (
    assert_forward_matches,
    assert_gradients_match,
    assert_matches,
)
from .data import inputs
from .derivatives import (
    call_double_backward,
    call_jvp,
    expected_double_backward,
    expected_jvp,
)
from .packed import (
    assert_packed_forward,
    assert_packed_gradients,
    packed_inputs,
)


def check_forward(backend, case):
    """Check out and lse."""
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, sums=case.sums(), **case.meaning())
    assert_forward_matches(got, want, case)


def check_gradients(backend, case):
    """Check all gradients, from out and lse of the NumPy path; return them."""
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
    got = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, sums=case.sums(), **case.meaning())
    assert_gradients_match(got, want, case)
    return got


def check_gradients_of_forward(backend, case):
    """Check all gradients, from the backend's own out and lse."""
    q, k, v, dout = inputs(case)
    got = calls.both(backend, case, q, k, v, dout)
    want = expected.backward(dout, q, k, v, sums=case.sums(), **case.meaning())
    assert_gradients_match(got, want, case)
    return got


def check_jvp(backend, case, direction):
    """Check out, lse and their tangents; return them."""
    got = call_jvp(case, direction, backend)
    wanted = expected_jvp(case, direction)
    names = "out_dot", "lse_dot"
    for name, x, want in zip(names, got[2:], wanted, strict=True):
        assert_matches(x, want, name, case)
    q, k, v, _ = inputs(case)
    want = expected.forward(q, k, v, sums=case.sums(), **case.meaning())
    assert_forward_matches(got[:2], want, case)
    return got


def check_double_backward(backend, case, direction):
    """Check all second gradients; return them, and what was expected."""
    got = call_double_backward(case, direction, backend)
    wanted = expected_double_backward(case, direction)
    for name, want in wanted.items():
        assert_matches(got[name], want, name, case)
    return got, wanted


def check_packed(backend, case, dlse=None):
    """Check packed sequences: forward, and backward from its out and lse.

    dlse : (1, heads, total_q), or None.
    """
    (q, k, v, dout), given = packed_inputs(case)
    out, lse = calls.forward(backend, case, *given[:3])
    assert_packed_forward((out, lse), q, k, v, case)
    more = {} if dlse is None else {"dlse": backend.place(dlse[0])}
    got = calls.backward(backend, case, given[3], *given[:3], out, lse, **more)
    assert_packed_gradients(got, dout, q, k, v, case, dlse)
