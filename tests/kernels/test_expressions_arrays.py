"""Arrays that users' functions read: dtypes, strides, no elements.

Kernels against NumPy arrays' own path.
"""

import numpy as np
import pytest

import cuflash
from helpers.backends import on_kernels
from helpers.compare import assert_allclose
from helpers.data import Emulation, inputs
from helpers.dtypes import DTYPES
from helpers.variants import case_of

CASE = case_of(
    17, 19, 16, dtype="float32", on=Emulation("sm_80", seed=1, family="simt")
)
BASE = np.random.default_rng(0).standard_normal((6, 8, 10), np.float32)
TWELVE = np.arange(12)


def by_three(score, b, h, q_idx, kv_idx, *, t):
    return score + t[b + 1, h, q_idx - kv_idx]


def by_key(score, b, h, q_idx, kv_idx, *, t):
    return score + t[kv_idx] * 0.25


def by_four(score, b, h, q_idx, kv_idx, *, t):
    return score + t[b, h, q_idx, kv_idx]


def unaligned():
    """A float32 array at an odd address."""
    return np.frombuffer(b"x" + BASE[0].tobytes(), np.uint8)[1:].view("f4")


def pairs():
    """One number a pair, keys first in memory."""
    shape = 2, 4, 19, 17
    numbers = np.random.default_rng(1).standard_normal(shape, np.float32)
    return numbers.swapaxes(2, 3)


ARRAYS = {
    "contiguous": (by_three, BASE),
    "reversed": (by_three, BASE[::-1, ::-1, ::-1]),
    "broadcast": (by_three, np.broadcast_to(BASE[:1, :1], BASE.shape)),
    "of other bytes": (by_three, BASE.astype(">f4")),
    "float16": (by_three, BASE.astype(np.float16)),
    "bfloat16": (by_three, BASE.astype(DTYPES["bfloat16"])),
    "float64": (by_three, BASE.astype(np.float64)),
    "no elements": (by_three, BASE[:0]),
    "no element": (by_key, np.zeros(0, np.float32)),
    "uint8": (by_key, TWELVE.astype(np.uint8)),
    "int8": (by_key, (TWELVE - 6).astype(np.int8)),
    "uint16": (by_key, TWELVE.astype(np.uint16)),
    "uint32": (by_key, TWELVE.astype(np.uint32)),
    "uint64": (by_key, TWELVE.astype(np.uint64)),
    "int64": (by_key, TWELVE - 6),
    "bool": (by_key, TWELVE % 2 == 0),
    "a step": (by_key, BASE.ravel()[:57:3]),
    "unaligned": (by_key, unaligned()),
    "four axes": (by_four, pairs()),
}


def results(arrays, function, t, return_dmod):
    """Return out, dq and, if asked, the array's gradient."""
    q, k, v, dout = arrays
    options = {"score_mod": function, "mod_arrays": {"t": t}}
    out, lse = cuflash.forward(q, k, v, **options, return_lse=True)
    more = {"return_dmod": ("t",)} if return_dmod else {}
    dq, _, _, *rest = cuflash.backward(
        dout, q, k, v, out, lse, **options, **more
    )
    return out, dq, *(x["t"] for x in rest)


@on_kernels
@pytest.mark.parametrize("name", ARRAYS)
def test_is_read(backend, name):
    function, t = ARRAYS[name]
    if backend.name == "cupy" and not t.dtype.isnative:
        pytest.skip("CuPy's arrays have the machine's byte order")
    has_gradient = name in ("reversed", "broadcast", "float16", "no elements")
    arrays = inputs(CASE)
    want = results(arrays, function, t, has_gradient)
    placed = [backend.place(x) for x in arrays]
    with backend.running(CASE):
        got = results(placed, function, backend.place(t), has_gradient)
    for what, x, y in zip(("out", "dq", "dt"), got, want, strict=False):
        x = backend.fetch(x)
        assert x.dtype == y.dtype and x.shape == y.shape
        # Sums of up to 2 * 17 * 19 float32 numbers; float16 rounds its own.
        unit = 2.0**-11 if x.dtype == np.float16 else 2.0**-18
        largest = float(np.abs(y.astype(np.float64)).max(initial=0.0))
        bound = unit * (largest + 1)
        assert_allclose(
            x.astype(np.float64), y.astype(np.float64), what, atol=bound
        )
