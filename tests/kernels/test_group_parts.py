"""Backward of grouped heads in parts that hand on sums of dK and dV.

An L2 of few bytes makes the plan divide groups: GROUP_PARTS of the scheduler
of sm90/backward.cu.
"""

from dataclasses import replace

import pytest

import cuflash
from cuflash.plans.plan import device_of_arch, plan
from helpers import calls, expected
from helpers.backends import EmulatedBackend
from helpers.checks import check_gradients
from helpers.compare import (
    assert_bitwise,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem

EMULATED = EmulatedBackend()
ON = Emulation("sm_90a", seed=3, num_sms=3, l2_bytes=1000)
# Of both batches the first parts come first.
CASE = Case("bfloat16", 2, 100, 150, 4, 1, 64, 64, causal=True, on=ON)


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(head_dim):
    case = replace(CASE, head_dim=head_dim, head_dim_v=head_dim)
    check_gradients(EMULATED, case)


@needs_compiler
def test_infinity_in_the_first_part():
    """The last part flags the key tile, whose rows are then examined.

    Query 98 does not see the last key, which gets 0 * inf.
    """
    case = replace(CASE, spoiled=(("dout", (0, 98, 0, 0), "inf"),))
    q, k, v, dout = inputs(case)
    out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
    got = calls.backward(EMULATED, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, sums=case.sums(), causal=True)
    assert_gradients_match(got, want, case, kinds=False)


@needs_compiler
def test_bits_in_any_order():
    """One block at a time: parts wait for those that have started before."""
    q, k, v, dout = inputs(CASE)
    out, lse = calls.forward(EMULATED, CASE, q, k, v)
    first, *others = (
        calls.backward(
            EMULATED,
            replace(CASE, on=replace(ON, seed=seed, resident=resident)),
            dout, q, k, v, out, lse,
        )
        for seed, resident in [(3, None), (4, 1)]
    )  # fmt: skip
    for other in others:
        for a, b in zip(other[1:3], first[1:3], strict=True):
            assert_bitwise(a, b, "dk or dv")


@pytest.mark.parametrize(
    ("parts", "changes"),
    [
        (8, {}),
        (1, {"seqlen_q": 100, "seqlen_k": 100}),
        (1, {"num_heads_kv": 64}),
        (1, {"causal": False}),
        (1, {"deterministic": True}),
        (1, {"window": (30, 0)}),
        (1, {"segment_ids": True}),
    ],
)
def test_which_calls_divide_groups(parts, changes):
    changes = {
        "seqlen_q": 16384, "seqlen_k": 16384, "num_heads_q": 64,
        "num_heads_kv": 8, "head_dim": 128, "head_dim_v": 128,
        "causal": True, **changes,
    }  # fmt: skip
    problem = small_problem("backward", "bfloat16", **changes)
    kernels = plan(problem, device_of_arch("sm_90a")).kernels
    found = {dict(x.constants).get("GROUP_PARTS", 1) for x in kernels}
    assert max(found) == parts
