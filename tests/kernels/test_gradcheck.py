"""backward is the derivative of forward: central differences in float64.

f(t) = sum(dout * forward(q + t a, k, v)), and likewise for k and v, has at 0
the derivative sum(dq * a). A central difference with step h errs by a
multiple of h^2 = 6e-11 for the numbers here, which are about 1, and by
rounding of u / h = 1e-11. Directions have normal components, so derivatives
are as large as the gradient is long.
"""

import numpy as np
import pytest

from helpers import calls
from helpers.backends import BACKENDS, CUPY
from helpers.data import Case, Emulation, inputs

STEP = 2.0**-17  # about the cube root of u, where both errors are alike
RELATIVE = 1e-7
on_archs = pytest.mark.parametrize("arch", ["sm_75", "sm_80"])


def derivative(backend, case, arrays, dout, which, direction):
    """Return the derivative of sum(dout * out) along a direction."""
    moved = []
    for step in (STEP, -STEP):
        changed = list(arrays)
        changed[which] = arrays[which] + step * direction
        moved.append(calls.forward(backend, case, *changed)[0])
    return np.sum(dout * (moved[0] - moved[1])) / (2 * STEP)


def assert_derivatives(backend, case, directions):
    *arrays, dout = inputs(case)
    gradients = calls.both(backend, case, *arrays, dout)
    rng = np.random.default_rng(case.seed + 1)
    for which, gradient in enumerate(gradients):
        for _ in range(directions):
            direction = rng.standard_normal(gradient.shape)
            got = np.sum(gradient * direction)
            expected = derivative(
                backend, case, arrays, dout, which, direction
            )
            most = RELATIVE * np.linalg.norm(gradient)
            assert abs(got - expected) <= most, ("dq", "dk", "dv")[which]


@pytest.mark.parametrize("causal", [False, True])
@on_archs
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_derivatives(backend, arch, causal):
    case = Case("float64", 2, 19, 23, 4, 2, 16, 24, causal=causal,
                on=Emulation(arch))  # fmt: skip
    assert_derivatives(backend, case, directions=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("backend", [CUPY])
def test_gradients_are_derivatives_of_many_tiles(backend, head_dim, causal):
    case = Case("float64", 1, 517, 601, 4, 2, head_dim, head_dim,
                causal=causal)  # fmt: skip
    assert_derivatives(backend, case, directions=8)
