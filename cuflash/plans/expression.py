"""A user's own score_mod and mask_mod: which kernels depend on them."""

from __future__ import annotations

from dataclasses import replace

from cuflash.request.problem import Problem

from .kernel import KernelPlan, Plan


def has_score_mod(problem: Problem) -> bool:
    return getattr(problem, "score_mod", None) is not None


def has_mask_mod(problem: Problem) -> bool:
    return getattr(problem, "mask_mod", None) is not None


def has_expression(problem: Problem) -> bool:
    return has_score_mod(problem) or has_mask_mod(problem)


def constants(problem: Problem) -> tuple[tuple[str, bool], ...]:
    """The constants of score/expression.cuh."""
    return (
        ("SCORE_MOD", has_score_mod(problem)),
        ("MASK_MOD", has_mask_mod(problem)),
        ("DMOD", bool(getattr(problem, "return_dmod", ()))),
        ("FLAGS_OF_GROUPS", problem.direction.endswith("backward")),
    )


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
    from cuflash.expressions.text import text

    flags = dict(kernel.constants)
    score, mask = flags.get("SCORE_MOD"), flags.get("MASK_MOD")
    if not (score or mask):
        return kernel
    written = text(
        problem.score_mod if score else None,
        problem.mask_mod if mask else None,
        problem.mod_arrays,
        problem.return_dmod if flags.get("DMOD") else (),
    )
    return replace(kernel, expression=written)
