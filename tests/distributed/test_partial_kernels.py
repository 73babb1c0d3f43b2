"""The kernels that merge and add rows do what NumPy does."""

import numpy as np
import pytest

from cuflash import emulator
from cuflash.distributed.machine import Device, Host
from cuflash.launch.partial import MOST_OTHERS
from helpers.backends import EMULATED
from helpers.compare import (
    Expected,
    assert_elements,
    assert_matches,
)
from helpers.dtypes import DTYPES, PRECISION, lse_dtype
from helpers.rounding import finite

SHAPES = [(2, 9, 3, 8), (1, 7, 2, 33), (1, 5, 1, 260)]
on_kinds = pytest.mark.parametrize(
    ("dtype", "first_is_wide", "result_is_wide"),
    [
        ("bfloat16", False, True),
        ("bfloat16", True, True),
        ("bfloat16", True, False),
        ("bfloat16", False, False),
        ("float16", True, False),
        ("float32", True, True),
        ("float64", True, True),
    ],
)


def rows(shape, dtype, seed):
    """Rows of tokens that are a part of a larger array, of its own length."""
    batch, tokens, *rest = shape
    rng, more = np.random.default_rng(seed), 4 + seed
    whole = rng.standard_normal((batch, tokens + more, *rest)).astype(dtype)
    return whole[:, more:]


def lses(shape, dtype, seed):
    """Of rows that saw no key, too, of some with overflow, some far apart."""
    batch, tokens, heads, _ = shape
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((batch, heads, tokens + 1 + seed)) * 3
    whole[rng.random(whole.shape) < 0.2] *= 100
    whole[rng.random(whole.shape) < 0.2] = -np.inf
    whole[rng.random(whole.shape) < 0.05] = np.inf
    return whole.astype(dtype)[..., 1 + seed :]


def laid_out(shape, dtype):
    """Return a result to write, with tokens before it that stay."""
    batch, tokens, *rest = shape
    return np.zeros((batch, tokens + 2, *rest), dtype)[:, 2:]


def fresh(array):
    """A copy of the larger array, and the same part of it."""
    whole = array.base.copy()
    if array.ndim == 4:
        return whole[:, -array.shape[1] :]
    return whole[..., -array.shape[2] :]


def run(call, first, others, result, arch="sm_80"):
    """What a method writes, by kernels and by NumPy."""
    found = []
    for kind in (Device, Host):
        own = [fresh(x) for x in first]
        to = fresh(result)
        with emulator.active(arch):
            machine = kind(result) if kind is Device else kind()
            getattr(machine, call)(*own, others, to)
        found.append((to, *own))
    return found


def assert_close(got, want, dtype, result):
    """Within a rounding of each to the result's dtype, and some of float32's.

    exp of arguments up to 12 with an ulp of each, a sum, a quotient, of values
    of up to 8; the weight of a larger argument is below 2^-17. lse may be
    larger.
    """
    unit = PRECISION[np.dtype(result).name].unit
    small = PRECISION[dtype].sum_unit
    want = want.astype(np.float64)
    size = np.abs(finite(want))
    bound = 2 * unit * size + 32 * small * np.maximum(size, 8)
    assert_matches(got, Expected(want, want, bound, 0), "result", dtype)


on_counts = pytest.mark.parametrize("count", [1, MOST_OTHERS])


@on_kinds
@on_counts
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [EMULATED])
def test_merge(backend, shape, count, dtype, first_is_wide, result_is_wide):
    own, wide = DTYPES[dtype], lse_dtype(DTYPES[dtype])
    a = rows(shape, wide if first_is_wide else own, 0)
    others = [
        (rows(shape, own, 2 + i), lses(shape, wide, 12 + i))
        for i in range(count)
    ]
    result = laid_out(shape, wide if result_is_wide else own)
    got, want = run("merge", (a, lses(shape, wide, 1)), others, result)
    assert_close(got[0], want[0], dtype, result.dtype)
    assert_close(got[2], want[2], dtype, wide)  # lse


@on_kinds
@on_counts
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [EMULATED])
def test_add(backend, shape, count, dtype, first_is_wide, result_is_wide):
    own, wide = DTYPES[dtype], lse_dtype(DTYPES[dtype])
    a = rows(shape, wide if first_is_wide else own, 0)
    others = [rows(shape, own, 2 + i) for i in range(count)]
    result = laid_out(shape, wide if result_is_wide else own)
    got, want = run("add", (a,), others, result)
    assert got[0].tobytes() == want[0].tobytes()


@pytest.mark.parametrize("backend", [EMULATED])
def test_into_the_first_array(backend):
    a, b = (rows((1, 6, 2, 8), np.float32, seed) for seed in range(2))
    want = a + b
    with emulator.active("sm_80"):
        Device(a).add(a, [b], a)
    assert_elements(a, want, "a")
