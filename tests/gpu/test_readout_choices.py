"""What readouts choose, by arrays on a GPU and on the host."""

import numpy as np
import pytest

from helpers.backends import CupyBackend
from helpers.compare import assert_arrays_equal

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
LENGTH = 6


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (0,), (2, 0)])
def test_flags_of_indices(shape, dtype):
    """From the end too; out of range there is no query."""
    from cuflash.backends.cupy import flags_of

    x = np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)
    tokens = np.arange(LENGTH)
    want = (x[..., None] == tokens) | (x[..., None] == tokens - LENGTH)
    got = GPU.fetch(flags_of(GPU.place(x), LENGTH))
    assert_arrays_equal(got, want.any(axis=-2), "flags")


def test_an_array_of_the_host_goes_to_the_device_of_another():
    from cuflash.backends.cupy import on_device

    x, like = np.arange(5, dtype=np.int32), GPU.place(np.zeros(3))
    got = on_device(x, like)
    assert got.data.device_id == like.data.device_id
    assert_arrays_equal(GPU.fetch(got), x, "indices")
