"""Planned kernels for tests of building and compiling."""

from dataclasses import replace

from cuflash.plans.plan import device_of_arch, plan
from cuflash.request import options
from cuflash.request.problem import Problem, Tangents

from .options import TABLE

# What a problem of float16 has that asks for an option, by the option's name.
ASKED = {
    option.part_of or option.name: data.problem
    for option in options.TABLE
    if (data := TABLE.get(option.name)) and data.problem
}


def small_problem(direction, dtype, head_dim=64, **changes):
    """A causal problem of 128 tokens and two query heads; q, k, v move."""
    derivative = direction in ("jvp", "double_backward")
    fields = {
        "batch": 1,
        "seqlen_q": 128,
        "seqlen_k": 128,
        "num_heads_q": 2,
        "num_heads_kv": 1,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "scale": 0.125,
        "causal": True,
        "tangents": Tangents(("q", "k", "v")) if derivative else None,
    }
    return Problem(direction, dtype, **{**fields, **changes})


def kernels(direction, dtype, arch, head_dim=64, family=None, **changes):
    """The kernels of a small problem on an architecture."""
    problem = small_problem(direction, dtype, head_dim, **changes)
    return plan(problem, device_of_arch(arch), family).kernels


def small_kernel(arch="sm_80", head_dim=16, **constants):
    """A kernel that compiles in a tenth of a second."""
    (kernel,) = kernels("forward", "float32", arch, head_dim, "simt")
    known = {**dict(kernel.constants), **constants}
    return replace(kernel, constants=tuple(known.items()))
