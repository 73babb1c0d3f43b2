"""Backward of grouped heads in parts that hand on sums of dK and dV.

GROUP_PARTS of sm90/backward_scheduler.cuh. A small L2, and parts of one
iteration, make the plan divide groups.
"""

from dataclasses import replace

import pytest

import cuflash
from cuflash.plans import sm90_backward
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


@pytest.fixture(autouse=True)
def short_parts(request, monkeypatch):
    if "which" not in request.node.name:
        monkeypatch.setattr(sm90_backward, "_PART_ITERATIONS", 1)


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
    ("parts", "innermost", "changes"),
    [
        (8, False, {}),
        (4, False, {"seqlen_q": 4096, "seqlen_k": 4096}),
        (1, False, {"seqlen_q": 1024, "seqlen_k": 1024, "batch": 16}),
        (1, False, {"seqlen_q": 100, "seqlen_k": 100}),
        (4, False, {"num_heads_q": 32}),
        (16, False, {"num_heads_q": 32, "num_heads_kv": 2}),
        (1, True, {"num_heads_q": 32, "num_heads_kv": 2, "batch": 16,
                   "seqlen_q": 1024, "seqlen_k": 1024}),
        (2, False, {"head_dim": 64, "head_dim_v": 64, "seqlen_q": 4096,
                    "seqlen_k": 4096, "batch": 4}),
        (1, False, {"num_heads_kv": 64}),
        (1, False, {"causal": False}),
        (1, False, {"deterministic": True}),
        (1, False, {"window": (30, 0)}),
        (1, False, {"segment_ids": True}),
        (1, False, {"softcap": 30.0}),
    ],
)  # fmt: skip
def test_which_calls_divide_groups(parts, innermost, changes):
    changes = {
        "seqlen_q": 16384, "seqlen_k": 16384, "num_heads_q": 64,
        "num_heads_kv": 8, "head_dim": 128, "head_dim_v": 128,
        "causal": True, **changes,
    }  # fmt: skip
    problem = small_problem("backward", "bfloat16", **changes)
    main = plan(
        problem,
        replace(device_of_arch("sm_90a"), num_sms=132, l2_bytes=50 << 20),
    )
    constants = dict(
        x
        for kernel in main.kernels
        if kernel.entry == "backward_sm90"
        for x in kernel.constants
    )
    assert constants["GROUP_PARTS"] == parts
    assert constants["HEADS_INNERMOST"] == innermost
