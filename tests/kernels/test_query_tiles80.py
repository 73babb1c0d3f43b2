"""Backward with 80 queries an iteration: it computes dQ transposed."""

from dataclasses import replace

import pytest

from cuflash.plans.tiles import Tile
from helpers.backends import on_kernels
from helpers.checks import check_gradients
from helpers.data import Case, Emulation

TILE = Tile(80, 128, 12, num_stages=2, score_warps_q=8, ptxas_level=3)
ON = Emulation("sm_90a", seed=3, num_sms=3, backward_tile=TILE)
CASE = Case("bfloat16", 1, 80, 193, 2, 1, 128, 128, on=ON)


@on_kernels
@pytest.mark.parametrize("seqlen_q", [79, 80, 241])
def test_gradients(backend, seqlen_q):
    check_gradients(backend, replace(CASE, seqlen_q=seqlen_q))
