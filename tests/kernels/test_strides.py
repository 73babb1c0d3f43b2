"""Any strides: what a kernel cannot read in place is copied, not refused."""

import numpy as np
import pytest

import strategies
from helpers import calls, expected
from helpers.backends import on_backends
from helpers.compare import (
    assert_arrays_equal,
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import LAYOUTS, Case, Emulation, axes_reversed, inputs
from helpers.drawn import on_each_backend

DTYPES = ("float16", "bfloat16", "float32")
WRITABLE_LAYOUTS = [name for name in LAYOUTS if name != "broadcast"]


@on_each_backend(
    strategies.cases,
    each={"layout": LAYOUTS},
    dtypes=DTYPES,
    longest=70,
    archs=strategies.FAMILIES,
)
def test_forward(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_backend(
    strategies.cases,
    each={"layout": LAYOUTS},
    dtypes=DTYPES,
    longest=70,
    archs=strategies.FAMILIES,
)
def test_backward(backend, case):
    q, k, v, dout = inputs(case)
    out, lse = calls.states(case, q, k, v)
    if case.layout != "broadcast":  # which would change the values of out
        out = LAYOUTS[case.layout](out)
    lse = axes_reversed(lse)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


# Rows of which the last chunk of 16 bytes is not whole: at aligned addresses,
# and at ones that only the tokens' stride keeps from being so.
RAGGED_ROWS = [
    Case("bfloat16", 2, 40, 40, 2, 1, 20, 20, layout=layout, on=Emulation(on))
    for layout in ("padded_rows", "heads_outside")
    for on in strategies.FAMILIES
]


@on_each_backend(
    strategies.cases,
    each={"layout": WRITABLE_LAYOUTS},
    dtypes=DTYPES,
    longest=70,
    archs=strategies.FAMILIES,
    examples=RAGGED_ROWS,
)
def test_out_argument(backend, case):
    q, k, v, dout = inputs(case)
    plain, _ = calls.forward(backend, case, q, k, v)
    target = backend.place(dout)
    result, _ = calls.forward(backend, case, q, k, v, out=target)
    assert_bitwise(backend.fetch(target), plain, "out")
    assert_bitwise(result, plain, "result")


@on_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_argument_leaves_the_gaps_alone(backend, dtype):
    case = Case(dtype, seqlen_q=70, num_heads_q=2)
    q, k, v, dout = inputs(case)
    batch, tokens, heads, d = dout.shape
    store = np.full((batch, 2 * tokens, heads, 2 * d), np.nan, dout.dtype)
    gaps = np.ones(store.shape, bool)
    gaps[:, ::2, :, :d] = False
    store = backend.place(store)
    calls.forward(backend, case, q, k, v, out=store[:, ::2, :, :d])
    assert_arrays_equal(
        np.isnan(backend.fetch(store).astype(float)), gaps, "NaN of the store"
    )
