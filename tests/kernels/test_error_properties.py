"""Root mean squares of errors: a rounding too many is seen.

A bound on each element forgives a fault that adds a part to every error. Over
thousands of elements the root of the mean square hardly depends on the data.
"""

import numpy as np
import pytest

from helpers import calls, expected, necessary
from helpers.backends import CUPY, EMULATED, on_kernels
from helpers.data import SIMT, Case, Emulation, inputs
from helpers.heads import heads_first, heads_last

# Heads are problems of their own, which share one launch; 64 of them, or 16
# where an emulated launch takes seconds. The 16-bit kernels have several tiles
# of keys, whose parts of dQ are added up.
SHAPE = {"seqlen_q": 64, "seed": 1}
on_problems = pytest.mark.parametrize("problems", [16, 64])


def heads(problems):
    return {"num_heads_q": problems, "num_heads_kv": problems}


def rms(x):
    return np.sqrt((np.asarray(x, np.float64) ** 2).mean())


def results(backend, case, arrays):
    """Return out, dq, dk and dv of a case."""
    out, lse = calls.forward(backend, case, *arrays[:3])
    q, k, v, dout = arrays
    return out, *calls.backward(backend, case, dout, q, k, v, out, lse)


def exact(case, arrays):
    """Return what to expect of out, dq, dk and dv."""
    q, k, v, dout = arrays
    out, _ = expected.forward(q, k, v, **case.meaning())
    return out, *expected.backward(dout, q, k, v, **case.meaning())


def largest_ratio(n):
    """How far the rms of n errors may be above that of the model.

    That of n normal numbers strays by 1 / sqrt(2 n), here three times that.
    The model takes the weight of a row's maximum, often the largest error of
    out, as 1 and so as exact. wgmma takes the maximum of half of the scores,
    which costs 3 % where there are 256.
    """
    return 1.03 + 3 / np.sqrt(2 * n)


def check_stored(got, arrays, scale):
    """Check results of 16-bit types against the model of their roundings."""
    model = necessary.results(
        *map(heads_first, arrays), dtype=arrays[0].dtype, scale=scale
    )
    names = "out", "dq", "dk", "dv"
    for name, x, (y, want) in zip(names, got, model, strict=False):
        ratio = rms(x - heads_last(want)) / rms(y - want)
        assert ratio <= largest_ratio(x.size), (
            f"{name}: the rms of its errors is {ratio:.3f} of the model's, "
            f"more than {largest_ratio(x.size):.3f}"
        )


@on_kernels
@on_problems
@pytest.mark.parametrize(
    ("dtype", "arch"), [("bfloat16", "sm_80"), ("float16", "sm_90a")]
)
def test_16_bits_are_rounded_no_more_than_need_be(
    backend, dtype, arch, problems
):
    shape = {**SHAPE, **heads(problems)}
    case = Case(dtype, seqlen_k=256, on=Emulation(arch), **shape)
    arrays = inputs(case)
    check_stored(results(backend, case, arrays), arrays, case.head_dim**-0.5)


@on_kernels
@pytest.mark.parametrize("num_sms", [3, 100])
def test_decode_rounds_no_more_than_need_be(backend, num_sms):
    """Of 66 problems, whose keys are in one part or in three."""
    case = Case(
        "bfloat16", 11, 3, 600, 6, 6, 64, 64, seed=1,
        on=Emulation("sm_90a", num_sms=num_sms),
    )  # fmt: skip
    arrays = inputs(case)
    out, _ = calls.forward(backend, case, *arrays[:3])
    check_stored([out], arrays, case.head_dim**-0.5)


@on_problems
@pytest.mark.parametrize(
    ("backend", "on", "precision"),
    [
        pytest.param(*backend.values, *kind, marks=backend.marks)
        for backend, *kind in (
            (EMULATED, Emulation(), None),
            (EMULATED, SIMT, None),
            (EMULATED, Emulation(), "tf32x3"),
            (CUPY, None, None),
        )
    ],
)
def test_float32_is_about_as_good_as_plain_attention(
    backend, on, precision, problems
):
    """By the factors of CONTRIBUTING ("Error"), of the rms of all.

    A GPU's tensor cores truncate, so tf32x3's rms is 2.6 times plain's there:
    its bounds (docs/guide/accuracy.md) are those of test_error_bounds.py.
    """
    case = Case(
        "float32", seqlen_k=64, precision=precision, on=on,
        **SHAPE, **heads(problems),
    )  # fmt: skip
    arrays = inputs(case)
    got, want = results(backend, case, arrays), exact(case, arrays)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        ratio = rms(x - y.ref) / rms(y.low - y.ref)
        assert ratio <= y.factor, f"{name}: {ratio:.3f} times plain's rms"
