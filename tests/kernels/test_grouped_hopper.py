"""Backward of grouped heads on Hopper: HEADS_INNERMOST of its scheduler.

Up to 16 heads a group and seven query tiles: a visit left out, or
made twice, changes a hundredth of a gradient and more.
"""

from dataclasses import replace

import pytest

from cuflash.plans.plan import device_of_arch, plan
from helpers.backends import on_kernels
from helpers.checks import check_double_backward, check_gradients, check_packed
from helpers.data import Case, Emulation
from helpers.derivatives import assert_near, tangents
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=3, num_sms=2)
CASE = Case("bfloat16", 1, 200, 193, 16, 1, 64, 64, causal=True, on=ON)
GROUP = {64: 16, 128: 16, 256: 8, 320: 8}  # heads, by head_dim


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256, 320])
def test_gradients(backend, head_dim):
    """More keys than queries: the first key tiles are seen by all."""
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    heads = {"num_heads_q": GROUP[head_dim]}
    check_gradients(backend, replace(CASE, **dims, **heads))
    check_gradients(backend, replace(CASE, **dims, **heads, seqlen_q=129))


@on_kernels
def test_packed_sequences(backend):
    offsets = (0, 130, 130, 155, 200), (0, 70, 90, 90, 193)
    check_packed(backend, replace(CASE, offsets=offsets))


@on_kernels
def test_double_backward(backend):
    direction = tangents(CASE)
    got, wanted = check_double_backward(backend, CASE, direction)
    assert_near(got, {name: x.ref for name, x in wanted.items()}, CASE)


@pytest.mark.parametrize(
    ("innermost", "changes"),
    [
        (True, {}),
        (False, {"num_heads_q": 8}),
        (True, {"num_heads_q": 8, "head_dim": 256, "head_dim_v": 256}),
        (True, {"num_heads_q": 8, "head_dim": 320, "head_dim_v": 320}),
        (False, {"num_heads_kv": 16}),
        (False, {"causal": False}),
        (False, {"deterministic": True}),
        (False, {"window": (30, 0)}),
        (False, {"segment_ids": True}),
    ],
)
def test_which_calls_visit_heads_innermost(innermost, changes):
    changes = {"num_heads_q": 16, "num_heads_kv": 1, **changes}
    problem = small_problem("backward", "bfloat16", **changes)
    kernels = plan(problem, device_of_arch("sm_90a")).kernels
    found = {dict(x.constants).get("HEADS_INNERMOST") for x in kernels}
    assert (True in found) == innermost
