"""Full backward whose last key tiles are divided: TAIL_PARTS."""

from dataclasses import replace

import pytest

from cuflash.plans import sm90_backward
from cuflash.plans.plan import device_of_arch, plan
from helpers.backends import EmulatedBackend
from helpers.checks import check_gradients
from helpers.data import Case, Emulation
from helpers.host_compiler import needs_compiler
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=3, num_sms=4)
# Six key tiles: two have parts, or with eight SMs all have.
CASE = Case("bfloat16", 1, 200, 257, 4, 2, 64, 64, on=ON)


@needs_compiler
@pytest.mark.parametrize("num_sms", [4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(num_sms, head_dim, monkeypatch):
    monkeypatch.setattr(sm90_backward, "_tail_parts", lambda *_: 3)
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    on = replace(ON, num_sms=num_sms)
    check_gradients(EmulatedBackend(), replace(CASE, **dims, on=on))


@pytest.mark.parametrize(
    ("parts", "heads", "head_dim", "seqlen", "changes"),
    [
        (5, 16, 128, 16384, {}),
        (1, 16, 128, 1024, {"batch": 16}),
        (3, 32, 64, 16384, {}),
        (2, 4, 128, 2048, {}),
        (1, 16, 128, 2048, {}),
        (1, 33, 128, 16384, {}),
        (1, 16, 128, 16384, {"causal": True}),
        (1, 16, 128, 16384, {"deterministic": True}),
        (1, 16, 128, 16384, {"softcap": 30.0}),
    ],
)
def test_which_calls_divide_the_tail(parts, heads, head_dim, seqlen, changes):
    """33 heads of 128 key tiles are 32 key tiles an SM, and none left."""
    sizes = {
        "seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": heads,
        "num_heads_kv": heads, "head_dim": head_dim, "head_dim_v": head_dim,
        "causal": False,
    }  # fmt: skip
    problem = small_problem("backward", "bfloat16", **{**sizes, **changes})
    device = replace(device_of_arch("sm_90a"), num_sms=132)
    constants = [dict(x.constants) for x in plan(problem, device).kernels]
    assert max(x.get("TAIL_PARTS", 1) for x in constants) == parts
