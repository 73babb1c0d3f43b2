"""float16 on sm_75: MMAs of eight products, copies that are complete at once.

bfloat16 runs on CUDA cores there (test_widened.py).
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
CASE = Case("float16", 1, 65, 129, 2, 1, 64, 64, causal=True, seed=75, on=ON)

emulated = pytest.mark.parametrize("backend", [EMULATED])


def check(backend, case):
    check_forward(backend, case)
    check_gradients(backend, case)


@emulated
def test_lengths_after_the_edges_of_tiles(backend):
    check(backend, CASE)


@emulated
def test_lengths_at_and_before_the_edges(backend):
    check(backend, replace(CASE, seqlen_q=128, seqlen_k=127, causal=False))


@emulated
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dims", [(20, 72), (128, 96), (224, 256)])
def test_head_dims(backend, dtype, head_dims):
    """A row's last chunk is copied in part, if at all."""
    d, dv = head_dims
    case = replace(CASE, dtype=dtype, head_dim=d, head_dim_v=dv, seqlen_k=50)
    check(backend, case)


@emulated
def test_all_options(backend):
    check(backend, replace(CASE, seqlen_k=70, **ALL))


@emulated
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries(backend, rows, head_dim):
    few = replace(CASE, seqlen_q=rows, seqlen_k=600, head_dim=head_dim)
    check_forward(backend, replace(few, head_dim_v=head_dim))


@emulated
def test_derivatives(backend):
    case = replace(CASE, seqlen_q=40, seqlen_k=70)
    check_jvp(backend, case, tangents(case))
    check_double_backward(backend, case, tangents(case))
