"""Backward on Hopper where a block has all keys of a head: OWNED_DQ."""

from dataclasses import replace

import pytest

from helpers.backends import on_kernels
from helpers.checks import check_gradients
from helpers.data import Case, Emulation

ON = Emulation("sm_90a", seed=3, num_sms=2)
CASE = Case("bfloat16", 1, 257, 257, 4, 4, 64, 64, on=ON)


@on_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_gradients(backend, head_dim, causal):
    dims = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal}
    check_gradients(backend, replace(CASE, **dims))


@on_kernels
@pytest.mark.parametrize("lengths", [(129, 385), (256, 256), (384, 255)])
def test_lengths(backend, lengths):
    for causal in {False, lengths[0] <= lengths[1]}:
        check_gradients(backend, replace(CASE, seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal))
