"""A user's own score_mod and mask_mod: which kernels depend on them."""

from __future__ import annotations

from dataclasses import replace

from cuflash.expressions.reals import SHORT
from cuflash.expressions.text import text
from cuflash.request.problem import Problem

from .kernel import KernelPlan, Plan

_INCLUDES = """\
#include "score/mod_arrays.cuh"
#include "score/visibility.cuh"

"""


def has_expression(problem: Problem) -> bool:
    """Whether a call has a function of the user's."""
    return not (problem.score_mod is problem.mask_mod is None)


def with_text(plan: Plan) -> Plan:
    """The plan with the texts of its kernels' expressions.

    A kernel that does not depend on a function is compiled without it.
    """
    if not has_expression(plan.problem):
        return plan
    launches = (
        replace(launch, kernel=_with_text(plan.problem, launch.kernel))
        for launch in plan.launches
    )
    return replace(plan, launches=tuple(launches))


def _with_text(problem: Problem, kernel: KernelPlan) -> KernelPlan:
    has = {name for name, value in kernel.constants if value is True}
    if has.isdisjoint(("SCORE_MOD", "MASK_MOD")):
        return kernel
    own = text(
        problem.score_mod if "SCORE_MOD" in has else None,
        problem.mask_mod if "MASK_MOD" in has else None,
        problem.mod_arrays,
        problem.return_dmod if "DMOD" in has else (),
        max(problem.seqlen_q, problem.seqlen_k) <= SHORT,
    )
    return replace(kernel, expression=_INCLUDES + own)
