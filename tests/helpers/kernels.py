"""Planned kernels for tests of building and compiling."""

from dataclasses import replace

from cuflash.plan import device_of_arch, plan
from cuflash.problem import Problem


def kernels(direction, dtype, arch, head_dim=64, causal=True):
    """The kernels of a small problem on an architecture."""
    problem = Problem(
        direction, dtype, 1, 128, 128, 2, 1, head_dim, head_dim, 0.125, causal
    )
    return plan(problem, device_of_arch(arch)).kernels


def small_kernel(arch="sm_80", head_dim=16, **constants):
    """A kernel that compiles in a tenth of a second."""
    (kernel,) = kernels("forward", "float32", arch, head_dim)
    known = {**dict(kernel.constants), **constants}
    return replace(kernel, constants=tuple(known.items()))
