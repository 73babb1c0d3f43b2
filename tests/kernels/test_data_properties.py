"""Data that punishes, in every family: each key head has a kind of its own.

Property tests draw these kinds too; here each family meets all of them.
"""

from dataclasses import replace

import numpy as np
import pytest

from helpers import calls, expected
from helpers.backends import BACKENDS, EMULATED
from helpers.checks import check_forward, check_gradients_of_forward
from helpers.compare import assert_matches
from helpers.data import SIMT, Case, Emulation, inputs
from helpers.punishing import KINDS

HEADS = {"num_heads_q": len(KINDS), "num_heads_kv": len(KINDS)}
CASE = Case(seqlen_q=40, seqlen_k=150, values="punishing", seed=1, **HEADS)
FAMILIES = {
    "mma": {"dtype": "float16"},
    "wgmma": {"dtype": "bfloat16", "on": Emulation("sm_90a")},
    "fma": {"dtype": "float32"},
    "tf32x3": {"dtype": "float32", "precision": "tf32x3", "seqlen_k": 90},
    "dmma": {"dtype": "float64", "seqlen_k": 90},
    "simt": {"dtype": "float32", "on": SIMT},
}
each_family = pytest.mark.parametrize(
    "fields", FAMILIES.values(), ids=FAMILIES
)
on_each = pytest.mark.parametrize("backend", BACKENDS)


@on_each
@each_family
def test_attention_and_gradients(backend, fields):
    case = replace(CASE, **fields)
    check_forward(backend, case)
    check_gradients_of_forward(backend, case)


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_sms", [1, 50])
def test_decode(backend, dtype, num_sms):
    """In one part and in parts."""
    on = Emulation("sm_90a", num_sms=num_sms, resident=2)
    shape = {"seqlen_q": 2, "seqlen_k": 600, "head_dim": 64, "head_dim_v": 64}
    check_forward(backend, replace(CASE, dtype=dtype, on=on, **shape))


def check_last_keys(backend, case, arrays):
    """Check dk and dv of the last keys alone, given lse over all keys.

    |lse| is large, and some rows have almost all of their weight elsewhere.
    """
    q, k, v, dout = arrays
    q *= q.dtype.type(8)
    want = expected.backward(dout, q, k, v, sums=case.sums(), **case.meaning())
    out, lse = calls.states(case, q, k, v)
    last = np.s_[:, 40:]
    got = calls.backward(backend, case, dout, q, k[last], v[last], out, lse)
    for name, x, y in zip(("dk", "dv"), got[1:], want[1:], strict=True):
        assert_matches(x, y.at(last), name, case)


@on_each
@each_family
def test_lse_may_cover_more_keys(backend, fields):
    """As distributed attention asks for them."""
    case = replace(CASE, **fields)
    check_last_keys(backend, case, inputs(case))


@on_each
def test_lse_may_cover_more_keys_of_large_values(backend):
    """Values above 2^40 take another path on NumPy arrays: the reference."""
    q, k, v, dout = inputs(CASE)
    v *= 2.0**41
    check_last_keys(backend, CASE, (q, k, v, dout))
