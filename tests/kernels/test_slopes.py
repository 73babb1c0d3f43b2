"""ALiBi slopes of float64 with float64 arrays keep their digits."""

import numpy as np
import pytest

import cuflash
from helpers.backends import on_backends
from helpers.compare import assert_allclose
from helpers.data import Case, inputs

CASE = Case("float64", 1, 40, 40, 2, 2, head_dim=8, head_dim_v=8)


@on_backends
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slopes_are_read_as_they_are(backend, dtype):
    q, k, v, _ = inputs(CASE)
    slopes = np.array([0.1, 0.3]).astype(dtype)
    distance = np.abs(np.arange(40)[:, None] - np.arange(40))
    bias = -slopes.astype(np.float64)[:, None, None] * distance
    results = []
    for options in ({"alibi_slopes": slopes}, {"bias": bias}):
        placed = [backend.place(x) for x in (q, k, v)]
        options = {name: backend.place(x) for name, x in options.items()}
        with backend.running(CASE):
            results.append(backend.fetch(cuflash.forward(*placed, **options)))
    # Scores of up to 40 are rounded, in both; a weight is off by as much.
    bound = 2 * 40 * 2.0**-52 * np.abs(v).max() * 4
    assert_allclose(*results, name="results", atol=bound)
