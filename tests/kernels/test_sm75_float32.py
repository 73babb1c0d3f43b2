"""float32 on sm_75: register tiles in 64 KiB, copies complete at once.

Peaked rows and lengths beside the edges of tiles show what random data
forgives.
"""

from dataclasses import replace

import pytest

from helpers.backends import EMULATED
from helpers.checks import (
    check_double_backward,
    check_forward,
    check_gradients,
    check_jvp,
)
from helpers.data import Case, Emulation
from helpers.derivatives import tangents
from helpers.option_cases import ALL

ON = Emulation("sm_75", num_sms=3, seed=7, resident=2)
CASE = Case("float32", 1, 49, 17, 2, 1, 96, 96, causal=True, seed=75, on=ON)

emulated = pytest.mark.parametrize("backend", [EMULATED])


def check(backend, case):
    check_forward(backend, case)
    check_gradients(backend, case)


@emulated
def test_three_warps_share_head_dim_96(backend):
    """Backward; one query and one key after the edges of its tiles."""
    check(backend, CASE)


@emulated
@pytest.mark.parametrize("head_dims", [(192, 170), (255, 256)])
def test_eight_queries_of_large_heads(backend, head_dims):
    """A row's last chunk is copied in part."""
    d, dv = head_dims
    shape = {"seqlen_q": 9, "seqlen_k": 33, "head_dim": d, "head_dim_v": dv}
    check(backend, replace(CASE, values="one_large", **shape))


@emulated
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_at_and_before_the_edges(backend, head_dim):
    shape = {"seqlen_q": 128, "seqlen_k": 63, "causal": False}
    both = {"head_dim": head_dim, "head_dim_v": head_dim}
    check(backend, replace(CASE, **shape, **both))


@emulated
def test_all_options(backend):
    check(backend, replace(CASE, seqlen_k=50, **ALL))


@emulated
def test_derivatives(backend):
    case = replace(CASE, seqlen_q=40, seqlen_k=50, head_dim=64, head_dim_v=64)
    check_jvp(backend, case, tangents(case))
    check_double_backward(backend, case, tangents(case))
