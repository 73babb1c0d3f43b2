"""The guide's variants in the kernels: results are those of NumPy arrays."""

import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash
from helpers.backends import on_kernels
from helpers.compare import assert_allclose
from helpers.data import Case, Emulation

PAGE = Path(__file__).parents[2] / "docs/guide/expressions.md"
BLOCKS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
)
# A bound on errors, in parts of a result's largest element. A gradient of an
# array sums thousands of terms of both signs, in float32; with 16-bit types P,
# dS and results are rounded to 8 bits.
FAMILIES = {
    "fma": (np.float32, "sm_80", 2.0**-16),
    "sm80": (ml_dtypes.bfloat16, "sm_80", 2.0**-6),
    "sm90": (ml_dtypes.bfloat16, "sm_90a", 2.0**-6),
}


class Compared:
    """In the place of cuflash: each call also runs on a backend."""

    def __init__(self, backend, family):
        self.backend, self.calls = backend, 0
        self.dtype, arch, self.bound = FAMILIES[family]
        on = Emulation(arch, num_sms=2, seed=1, family=family)
        self.case = Case(on=on)

    def __getattr__(self, name):
        return getattr(cuflash, name)

    def forward(self, q, k, v, **options):
        return self._both(cuflash.forward, (q, k, v), options)

    def backward(self, dout, q, k, v, out, lse, **options):
        arrays = dout, q, k, v, out, lse
        return self._both(cuflash.backward, arrays, options)

    # On NumPy alone: test_expressions_derivatives.py compares them.
    def jvp(self, *arrays, **options):
        return cuflash.jvp(*map(self._rounded, arrays), **options)

    def double_backward(self, *arrays, **options):
        return cuflash.double_backward(*map(self._rounded, arrays), **options)

    def _both(self, call, arrays, options):
        arrays = [self._rounded(x) for x in arrays]
        want = call(*arrays, **options)
        place = self.backend.place
        with self.backend.running(self.case):
            got = call(*map(place, arrays), **self._placed(options))
        for name, x, y in zip("abcd", _all(got), _all(want), strict=False):
            bound = self.bound * float(np.abs(y).max())
            fetched = self.backend.fetch(x).astype(y.dtype)
            assert_allclose(fetched, y, f"{call.__name__}: {name}", atol=bound)
        self.calls += 1
        return want

    def _rounded(self, array):
        """An array in the dtype; lse, which has no axis of columns, as is."""
        if array is None or array.ndim == 3:
            return array
        return array.astype(self.dtype)

    def _placed(self, value):
        if isinstance(value, dict):
            return {x: self._placed(y) for x, y in value.items()}
        if isinstance(value, cuflash.TileMask):
            return replace(value, mod_arrays=self._placed(value.mod_arrays))
        return self.backend.place(value) if hasattr(value, "ndim") else value


def _all(results):
    """Arrays of a result, those of dmod too."""
    for x in results if isinstance(results, tuple) else (results,):
        yield from x.values() if isinstance(x, dict) else (x,)


@on_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_variants(backend, family):
    compared = Compared(backend, family)
    names = {"cuflash": compared}
    for block in BLOCKS:
        block = block.replace("import cuflash\n", "")
        # What the page asserts are bounds of float32.
        exec(block.replace("assert np.allclose", "np.allclose"), names)
    assert compared.calls > 30
