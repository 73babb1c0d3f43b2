"""A bias's gradient that kernels store: the emulator's memory holds NaN."""

from itertools import product

import numpy as np
import pytest

from cuflash.plans.tiles import Tile
from helpers import visibility as probe
from helpers.backends import EMULATED
from helpers.data import Case, Emulation
from helpers.dtypes import DTYPES
from helpers.visibility_grids import around, of

HIDDEN = -1024.0  # exp of it is 0 in float64 too
NARROW = Tile(128, 128, 12, num_stages=2, score_warps_q=8, ptxas_level=3)


def check(backend, case, tile, has_mask, of_bias=None):
    """Around edges, each pair has its own dS, a masked one 0."""
    for seqlen_q, seqlen_k in product(
        *map(around, (tile.block_q, tile.block_k))
    ):
        shape = (1, 2, seqlen_q, seqlen_k)
        rng = np.random.default_rng([seqlen_q, seqlen_k])
        weights, mask = rng.integers(0, 2, (2, *shape))
        bias = (HIDDEN * (1 - weights)).astype(of_bias or DTYPES[case.dtype])
        options = {"bias": bias, "return_dbias": True}
        if has_mask:
            weights, options["mask"] = weights * mask, mask > 0
        arrays = probe.arrays(case.dtype, 1, seqlen_q, seqlen_k, 2)
        with backend.running(case):
            *got, dbias = probe.gradients(backend, weights, *arrays, **options)
        probe.assert_gradients(got, weights, *arrays[:2], arrays[3])
        probe.report(dbias != weights, "dbias", dbias, weights, "weight")


@pytest.mark.parametrize("has_mask", [False, True])
@of("backward")
def test_each_element_is_stored(backend, grid, has_mask):
    check(backend, grid.case, grid.tile, has_mask)


@pytest.mark.parametrize("of_bias", ["float32", None])
@pytest.mark.parametrize("backend", [EMULATED])
def test_narrow_heads_on_hopper(backend, of_bias):
    on = Emulation("sm_90a", backward_tile=NARROW)
    check(backend, Case("bfloat16", on=on), NARROW, False, of_bias)
