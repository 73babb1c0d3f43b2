"""float8_e4m3fn numbers, to elements and back: all of them, exactly."""

import ml_dtypes
import numpy as np
import pytest

from helpers.compare import assert_all, assert_arrays_equal
from helpers.dtypes import DTYPES
from helpers.small_kernels import on_both, read_only, run

FLOAT8 = ml_dtypes.float8_e4m3fn


def converted(backend, x):
    """Return all 256 numbers as elements and as floats, and x as float8."""
    found = {
        "float16s": np.empty(256, np.uint16),
        "by_bits": np.empty(256, np.uint16),
        "bfloat16s": np.empty(256, np.uint16),
        "nan": np.empty(256, np.uint8),
        "floats": np.empty(256, np.float32),
        "rounded": np.empty(4096, np.uint8),
    }
    words = np.arange(256, dtype=np.uint8).view(np.uint32)
    run(
        "primitives/float8",
        {"words": read_only(words), "x": read_only(x), **found}, backend,
        threads=64,
    )  # fmt: skip
    return found


NUMBERS = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)


@on_both
@pytest.mark.parametrize("name", ["float16s", "by_bits", "bfloat16s"])
def test_every_number(backend, name):
    found = converted(backend, np.zeros(4096, np.float32))[name]
    dtype = DTYPES["bfloat16" if name == "bfloat16s" else "float16"]
    elements = found.view(dtype).astype(np.float32)
    assert_arrays_equal(elements, NUMBERS, "elements")


@on_both
def test_every_number_as_float(backend):
    found = converted(backend, np.zeros(4096, np.float32))
    assert_arrays_equal(found["floats"], NUMBERS, "floats")


@on_both
def test_nan_signs(backend):
    found = converted(backend, np.zeros(4096, np.float32))
    assert_arrays_equal(found["nan"], np.isnan(NUMBERS) * 0x80, "nan")


@on_both
@pytest.mark.parametrize("seed", range(3))
def test_rounding(backend, seed):
    """Ties go to even; beyond 448 lies 448; NaN stays."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(4096) * 2.0 ** rng.integers(-12, 10, 4096)
    numbers = np.arange(0x7F, dtype=np.uint8).view(FLOAT8).astype(float)
    x[:126] = (numbers[1:] + numbers[:-1]) / 2
    x[126:130] = np.inf, -np.inf, 1e30, -464
    x = x.astype(np.float32)
    found = converted(backend, x)["rounded"].view(FLOAT8)
    want = np.clip(x, -448, 448).astype(FLOAT8)
    assert_arrays_equal(found.view("u1"), want.view("u1"), "found")
    nan = converted(backend, np.full(4096, np.nan, np.float32))
    assert_all(
        nan["rounded"].view(FLOAT8).astype(np.float32), np.nan, "FLOAT8"
    )
