"""The error bounds of docs/guide/accuracy.md hold and are not loose.

They are reached, within a factor of ten, by inputs whose sums lose all terms
but one: 1 + u rounds to 1, and so does 1 + u + u + ... .
"""

import numpy as np
import pytest

from cuflash.check.bounds import ARITHMETIC
from helpers import bounds
from helpers.backends import BACKENDS, EMULATED, on_kernels
from helpers.calls import backward, forward
from helpers.compare import assert_at_most
from helpers.data import Case, Emulation, inputs
from helpers.heads import heads_first
from helpers.punishing import KINDS

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63,
    reason="exact results of float64 need a longer type",
)
NAMES = ("out", "lse", "dq", "dk", "dv")
HEADS, TERMS = 8, 128  # TERMS: of the sums
TILE = 32  # keys, few enough that a kernel adds most of them up at once
on_wide_types = pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float32", "sm_80"), ("float64", "sm_80"), ("float64", "sm_75")],
    ids=["fma", "dmma", "simt"],
)


def errors_and_bounds(backend, case, q, k, v, dout):
    """Return, by name, the errors of a call's results and their bounds."""
    out, lse = forward(backend, case, q, k, v)
    gradients = backward(backend, case, dout, q, k, v, out, lse)
    got = heads_first(out), lse, *map(heads_first, gradients)
    wide = (heads_first(x).astype(np.longdouble) for x in (dout, q, k, v))
    scale = case.scale or q.shape[-1] ** -0.5
    x = bounds.exact(*wide, scale=scale, causal=case.causal)
    kind = case.precision or case.dtype
    allowed = bounds.bounds(x, ARITHMETIC[kind])
    triples = zip(got, bounds.results(x), allowed, strict=True)
    pairs = [(np.abs(a - b), most) for a, b, most in triples]
    return dict(zip(NAMES, pairs, strict=True))


def assert_bounded(backend, case, *arrays):
    found = errors_and_bounds(backend, case, *arrays)
    for name, (error, most) in found.items():
        assert_at_most(error, most, name, case)


@on_wide_types
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_hold_of_data_that_punishes(backend, dtype, arch):
    """Each head has another kind."""
    count = len(KINDS)
    case = Case(dtype, seqlen_q=100, seqlen_k=130, head_dim=32, head_dim_v=32,
                num_heads_q=count, num_heads_kv=count, values="punishing",
                on=Emulation(arch))  # fmt: skip
    assert_bounded(backend, case, *inputs(case))


@pytest.mark.parametrize("spread", [0.1, 1, 5])
@pytest.mark.parametrize("causal", [False, True])
@on_wide_types
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_hold(backend, dtype, arch, causal, spread):
    case = Case(dtype, seqlen_q=100, seqlen_k=130, head_dim=32, head_dim_v=32,
                causal=causal, on=Emulation(arch))  # fmt: skip
    q, k, v, dout = inputs(case)
    q *= dtype_of(case)(spread)
    assert_bounded(backend, case, q, k, v, dout)


@on_kernels
def test_bounds_hold_of_wide_heads(backend):
    case = Case("float64", 1, 37, 50, 1, 1, 512, 64)
    assert_bounded(backend, case, *inputs(case))


@pytest.mark.parametrize("spread", [0.1, 1, 5])
@pytest.mark.parametrize("head_dim", [8, 64])
@on_kernels
def test_bounds_hold_in_parts(backend, head_dim, spread):
    case = Case("float32", 1, 100, 130, 1, 1, head_dim, 32, causal=True,
                precision="tf32x3")  # fmt: skip
    q, k, v, dout = inputs(case)
    q *= dtype_of(case)(spread)
    assert_bounded(backend, case, q, k, v, dout)


@on_kernels
def test_parts_at_their_worst(backend):
    """Numbers with the largest possible low parts, all of one sign."""
    case = Case("float32", 1, 60, 70, 1, 1, 64, 32, precision="tf32x3")
    arrays = [abs(x) for x in inputs(case)]
    for x in arrays:
        x[:] = np.ldexp(np.float32(1 + 2.0**-11 - 2.0**-23), np.frexp(x)[1])
    arrays[0] *= np.float32(2.0**-6)
    assert_bounded(backend, case, *arrays)


@pytest.mark.parametrize("backend", [EMULATED])
def test_one_product_in_parts(backend):
    """lse of a single key is its score, which is one product here.

    Emulated alone, where a sum is rounded once: of the largest of the three
    products by u, of the others, which are 2^-11 of it, by 2^-11 u each.
    Parts that were cut and not rounded would leave out 24 u.
    """
    case = Case("float32", 1, 512, 1, HEADS, HEADS, head_dim=1, head_dim_v=1,
                scale=1.0, precision="tf32x3")  # fmt: skip
    q, k, v, _ = inputs(case)
    # The whole range of what follows the first 11 bits, from both its ends.
    ends = 1 + np.arange(256) * 2.0**-23
    q[0, :, :, 0] = np.r_[ends, 1 + 2.0**-11 - (ends - 1)][:, None]
    q[:, 1::2] += np.float32(2.0**-11)
    k[0, 0, :, 0] = 1 + 2.0**-11 + (np.arange(HEADS) - 4) * 2.0**-23
    _, lse = forward(backend, case, q, k, v)
    exact = (q.astype(np.float64) * k)[..., 0].swapaxes(1, 2)
    x, u = ARITHMETIC["tf32x3"], 2.0**-24
    worst = (np.abs(lse - exact) / exact).max()
    assert 6 * u < worst <= x.split + u + 2 * 2.0**-11 * u


# Inputs that reach them ------------------------------------------------------


def dtype_of(case):
    return np.dtype(case.dtype).type


def one_and_many(case, array):
    """Fill with u, except for one token of each head."""
    u = ARITHMETIC[case.dtype].unit
    array[:] = u
    for head in range(HEADS):
        array[:, array.shape[1] // HEADS * head, head] = 1


def signs(array):
    """Fill the first column with alternating 1 and -1."""
    array[..., 0] = 1
    array[:, 1::2, :, 0] = -1


def lost_in_scores(case, q, k, v, dout):
    u = ARITHMETIC[case.dtype].unit
    q[:], k[:] = 2.0**-12, u * 2.0**12
    q[..., 0] = k[..., 0] = 1


def lost_in_out(case, q, k, v, dout):
    one_and_many(case, v)


def lost_in_dq(case, q, k, v, dout):
    """All P are equal; dP and the signs of k alternate."""
    signs(v)
    dout[..., 0] = 1
    one_and_many(case, k)
    k[:, 1::2] *= -1


def lost_in_dk(case, q, k, v, dout):
    """P is 1 / 2; dP alternates between 1 and -1."""
    signs(v)
    dout[..., 0] = 1
    one_and_many(case, q)


def lost_in_dv(case, q, k, v, dout):
    one_and_many(case, dout)


@pytest.mark.parametrize(
    ("name", "fill", "seqlen_q", "seqlen_k", "head_dim"),
    [
        ("lse", lost_in_scores, 1, 1, TERMS),
        ("out", lost_in_out, 1, TERMS, 16),
        ("dq", lost_in_dq, 1, TILE, 16),
        ("dk", lost_in_dk, TERMS, 2, 16),
        ("dv", lost_in_dv, TERMS, 1, 16),
    ],
    ids=["lse", "out", "dq", "dk", "dv"],
)
@on_wide_types
@pytest.mark.parametrize("backend", [EMULATED])
def test_bounds_are_reached(
    backend, dtype, arch, name, fill, seqlen_q, seqlen_k, head_dim
):
    """Emulated only: BLAS and tensor cores sum in unknown orders."""
    case = Case(dtype, 1, seqlen_q, seqlen_k, HEADS, HEADS, head_dim, 16,
                scale=1.0, on=Emulation(arch))  # fmt: skip
    arrays = [np.zeros_like(x) for x in inputs(case)]
    fill(case, *arrays)
    error, most = errors_and_bounds(backend, case, *arrays)[name]
    assert_at_most(error, most, name, case)
    assert (10 * error >= most).any()
