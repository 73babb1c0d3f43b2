"""Forward under the causal mask, whose last tiles have blocks of their own.

TailScheduler of common/scheduler.cuh. Few SMs, and a tail wherever there are
pairs of tiles, make small calls have one.
"""

from dataclasses import replace

import pytest

from cuflash.plans import sm90
from cuflash.plans.plan import device_of_arch, plan
from helpers.backends import EmulatedBackend
from helpers.checks import check_forward
from helpers.data import Case, Emulation
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem


@needs_compiler
@pytest.mark.parametrize("num_heads", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [448, 500])
def test_every_tile_is_computed(monkeypatch, num_heads, length):
    """Of 7 and 8 tiles; the tail begins with a head, within one, at 0."""
    monkeypatch.setattr(sm90, "_TAIL_GAIN", -100)
    case = Case(
        "float16", 1, length, length, num_heads, 1, 64, 64, causal=True,
        block_q=64, block_k=64, on=Emulation("sm_90a", seed=1, num_sms=1),
    )  # fmt: skip
    check_forward(EmulatedBackend(), case)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "changes", "schedule"),
    [
        (256, 32, {}, (64, 0, 14 * 132, 14 * 132 + 400)),
        (64, 32, {}, (43, 0, 9 * 132, 9 * 132 + 376)),
        (128, 33, {}, (64, 0, 33 * 64, 33 * 64)),
        (
            256,
            8,
            {"seqlen_q": 8192, "seqlen_k": 8192, "batch": 2},
            (32, 0, 512, 512),
        ),
        (256, 1024, {"seqlen_q": 512, "seqlen_k": 512}, (2, 0, 2048, 2048)),
        (256, 32, {"causal": False}, (0, 128, 0, 32 * 128)),
        (256, 32, {"window": (4096, 0)}, (0, 128, 0, 32 * 128)),
    ],
    ids=str,
)
def test_which_calls_have_a_tail(head_dim, num_heads, changes, schedule):
    """Those whose last round of pairs would be long, and not full."""
    problem = small_problem(
        "forward", "bfloat16", head_dim, num_heads_q=num_heads,
        num_heads_kv=1,
        **{"seqlen_q": 16384, "seqlen_k": 16384, **changes},
    )  # fmt: skip
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    assert plan(problem, device).work_items == schedule
