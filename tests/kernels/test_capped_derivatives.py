"""Derivatives with a softcap on Hopper: a part of the user's score there."""

from dataclasses import replace

import pytest

from cuflash.expressions import builtin, trace
from cuflash.plans.plan import device_of_arch, plan, with_capped_score
from helpers.backends import on_kernels
from helpers.checks import check_double_backward
from helpers.data import Case, Emulation
from helpers.derivatives import assert_near, tangents
from helpers.expression_derivatives import Call
from helpers.kernels import small_problem

CASE = Case("float16", 1, 65, 130, 4, 2, 64, 64, softcap=2.0,
            on=Emulation("sm_90a", seed=5))  # fmt: skip


def bent(score, b, h, q_idx, kv_idx):
    return score + 0.02 * (h + 1) * score * score


def family(direction, dtype="float16", arch="sm_90a", wanted=None, **options):
    problem = small_problem(direction, dtype, 64, **options)
    device = device_of_arch(arch)
    kept = with_capped_score(problem, device, wanted)
    assert (kept is problem) != (kept.softcap == 0)
    return plan(kept, device, wanted).family


@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
def test_which_calls_get_hoppers_kernels(direction):
    score, _ = trace.record(bent, "score_mod", trace.Given())
    for more in {}, {"causal": True}, {"score_mod": score}:
        assert family(direction, softcap=30.0, **more) == "sm90"
    others = {"alibi_slopes": True}, {"wanted": "sm80"}, {"arch": "sm_80"}
    for more in others:
        assert family(direction, softcap=30.0, **more) == "sm80"
    assert family(direction, softcap=129.0) == "sm80"  # tanh is exact
    assert family(direction, "float32", softcap=30.0) == "fma"


def test_a_cap_is_recognised_again():
    score, _ = trace.record(bent, "score_mod", trace.Given())
    assert builtin.softcap(builtin.with_softcap(3.0, score)) == (3.0, score)
    alone = builtin.with_softcap(3.0, None)
    assert builtin.softcap(alone)[0] == 3.0


@on_kernels
@pytest.mark.parametrize("more", [{"causal": True}, {"scale": -0.5}])
def test_is_the_references(backend, more):
    """Scores up to about 20, far beyond the cap."""
    case = replace(CASE, **more)
    got, wanted = check_double_backward(backend, case, tangents(case))
    assert_near(got, {name: x.ref for name, x in wanted.items()}, case)


@on_kernels
def test_before_a_users_score(backend):
    call = Call(CASE, ("q", "k", "v"), bent)
    assert_near(call.jvp(backend), call.expected_jvp(), CASE)
    got = call.double_backward(backend)
    assert_near(got, call.expected_double_backward(), CASE)
