"""Derivatives of calls in which everything differs.

Batches, groups of heads, head_dim and head_dim_v (also of the tiles that hold
them), lengths, and by `Apart` each array's strides; with all options and two
directions. A kernel that takes one array's size, stride, head or option for
another's is wrong here.
"""

from dataclasses import replace

import numpy as np
import pytest

from helpers import expected
from helpers.apart import Apart
from helpers.backends import on_kernels
from helpers.compare import assert_forward_matches, assert_matches
from helpers.data import SIMT, Case, Emulation, inputs
from helpers.derivatives import (
    EVERYTHING,
    NUMPY,
    assert_near,
    call_double_backward,
    call_jvp,
    expected_double_backward,
    expected_jvp,
    tangents,
)

# Few resident blocks: the same threads compute several tiles.
HOPPER = Emulation("sm_90a", seed=3, num_sms=2, resident=2)
# Columns are rounded up to 32 at least, by mma to 64: no two are alike. Of
# double_backward they trade places.
SHAPES = {
    "float16": ("float16", 40, 72, {}),
    "bfloat16": ("bfloat16", 72, 40, {"on": HOPPER}),
    "fma": ("float32", 40, 24, {}),
    "simt": ("float32", 24, 40, {"on": replace(SIMT, seed=3)}),
    "dmma": ("float64", 40, 24, {}),
    "tf32x3": ("float32", 24, 40, {"precision": "tf32x3"}),
}
CASES = {
    kind: Case(
        **EVERYTHING
        | {"dtype": dtype, "head_dim": d, "head_dim_v": dv}
        | {"num_heads_q": 4, "on": Emulation("sm_80", seed=3), **more}
    )
    for kind, (dtype, d, dv, more) in SHAPES.items()
}
on_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def turned(case):
    """The same with head_dim and head_dim_v exchanged."""
    return replace(case, head_dim=case.head_dim_v, head_dim_v=case.head_dim)


@on_kernels
@on_cases
def test_jvp_of_two_directions(backend, case):
    backend = Apart(backend)
    two = tangents(case, count=2)
    *both, out_dot, lse_dot = call_jvp(case, two, backend)
    forward = expected.forward(*inputs(case)[:3], **case.meaning())
    assert_forward_matches(both, forward, case)
    for n in range(2):
        want = expected_jvp(case, {name: x[n] for name, x in two.items()})
        got = {"out_dot": out_dot[n], "lse_dot": lse_dot[n]}
        for name, x in zip(got, want, strict=True):
            assert_matches(got[name], x, f"{name} of {n}", case)
        refs = (x.ref for x in want)
        assert_near(got, dict(zip(got, refs, strict=True)), case)
    backend.check_gaps()


@on_kernels
@on_cases
def test_double_backward(backend, case):
    case, backend = turned(case), Apart(backend)
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    want = expected_double_backward(case, direction)
    for name, x in want.items():
        assert_matches(got[name], x, name, case)
    assert_near(got, {name: x.ref for name, x in want.items()}, case)
    backend.check_gaps()


# What of each batch element and key head is not finite, in its last column:
# half of the tokens that its tile's rows meet do not see it.
SPOILED = {
    "q": ((0, 20, 1, -1), np.nan),
    "k": ((0, 30, 1, -1), np.inf),
    "v": ((1, 30, 0, -1), -np.inf),
}
OF_DOUT = (1, 20, 3, -1)


def spoil(direction):
    for name, (at, value) in SPOILED.items():
        direction[name][at] = value


@on_kernels
@on_cases
def test_what_is_not_finite_in_jvp(backend, case):
    """Of tangents: it reaches what NumPy finds, in its direction alone."""
    two = tangents(case, count=2)
    first = {name: x[0] for name, x in two.items()}
    second = {name: x[1] for name, x in two.items()}
    clean = [*map(expected_jvp, (case, case), (first, second))]
    spoil(second)
    got = call_jvp(case, two, Apart(backend))[2:]
    reached = call_jvp(case, second)[2:]
    for n, (name, x) in enumerate(zip(("out_dot", "lse_dot"), got,
                                      strict=True)):  # fmt: skip
        assert_matches(x[0], clean[0][n], name, case)
        want = with_nan(clean[1][n], reached[n])
        assert_matches(x[1], want, name, case, kinds=False)


def with_nan(clean, reached):
    """Return what to expect where a call that was spoiled is finite."""
    finite = np.isfinite(reached.astype(np.float64))
    assert finite.any()
    return clean._replace(ref=np.where(finite, clean.ref, np.nan))


@on_kernels
@on_cases
def test_what_is_not_finite_in_double_backward(backend, case):
    """Of dout and of cotangents; what these do not reach is as without."""
    case = turned(case)
    direction, dout = tangents(case), inputs(case)[3]
    clean = expected_double_backward(case, direction)
    spoil(direction)
    dout[OF_DOUT] = np.inf
    got, reached = (
        call_double_backward(case, direction, x, dout=dout)
        for x in (Apart(backend), NUMPY)
    )
    for name in "qkv":
        want = with_nan(clean[name], reached[name])
        assert_matches(got[name], want, name, case, kinds=False)
