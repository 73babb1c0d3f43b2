"""Directions of a jvp whose blocks have two of them at once.

A call of one direction has as many keys in a tile: else bits would differ.
"""

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import Tangents
from helpers.backends import on_kernels
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_finite,
)
from helpers.data import Case, Emulation
from helpers.derivatives import EVERYTHING, call_jvp, tangents
from helpers.kernels import small_problem

ON = Emulation("sm_80", seed=3)
SHAPE = {"batch": 1, "num_heads_q": 2, "num_heads_kv": 1}
PLAIN = Case("float32", seqlen_q=70, seqlen_k=90, head_dim=24, head_dim_v=12,
             block_k=32, on=ON, **SHAPE)  # fmt: skip
HOPPER = Case("bfloat16", seqlen_q=150, seqlen_k=200, head_dim=64,
              head_dim_v=64, causal=True, block_k=64,
              on=Emulation("sm_90a", seed=5), **SHAPE)  # fmt: skip
CASES = {
    "fma": PLAIN,
    "wgmma": HOPPER,
    "mma": Case("float16", block_k=32, on=ON, **{**EVERYTHING, **SHAPE}),
    "everything": Case(
        "float32", block_k=32, on=ON, **{**EVERYTHING, **SHAPE}
    ),
}
each_kernel = pytest.mark.parametrize(
    "case", [PLAIN, HOPPER], ids=["fma", "wgmma"]
)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def jvp_plan(count, head_dim=64, arch="sm_90a", dtype="float32", **fields):
    """The plan of a call with as many directions."""
    moving = Tangents(("q", "k", "v"), count)
    problem = small_problem("jvp", dtype, head_dim, tangents=moving, **fields)
    return plan(problem, device_of_arch(arch))


def in_turn(launches):
    """Of each launch: the directions of a block, and which it has.

    Kernels that compute flagged rows have no such constants.
    """
    which = {"FIRST_DIRECTION": "first", "LAST_DIRECTION": "last",
             "READS_OUT": "rest"}  # fmt: skip
    constants = [dict(launch.kernel.constants) for launch in launches]
    return [
        (x["DIRECTIONS"], *(name for key, name in which.items() if x[key]))
        for x in constants
        if "DIRECTIONS" in x
    ]


@on_kernels
@each_case
def test_are_calls_of_their_own(backend, case):
    five = tangents(case, count=5)
    alone = []
    for n in range(5):
        one = {name: x[n] for name, x in five.items()}
        alone.append(call_jvp(case, one, backend))
    for count in (1, 2, 3, 5):
        some = {name: x[:count] for name, x in five.items()}
        *both, out_dot, lse_dot = call_jvp(case, some, backend)
        for n in range(count):
            got = *both, out_dot[n], lse_dot[n]
            for a, b in zip(got, alone[n], strict=True):
                assert_bitwise(np.ascontiguousarray(a), b, f"{n} of {count}")


@on_kernels
@each_kernel
@pytest.mark.parametrize("moving", ["q", "k", "v"])
def test_one_input_moves(backend, case, moving):
    three = tangents(case, moving, count=3)
    *_, out_dot, lse_dot = call_jvp(case, three, backend)
    for n in range(3):
        one = {moving: three[moving][n]}
        *_, out_alone, lse_alone = call_jvp(case, one, backend)
        assert_bitwise(np.ascontiguousarray(out_dot[n]), out_alone, str(n))
        assert_bitwise(np.ascontiguousarray(lse_dot[n]), lse_alone, str(n))


@on_kernels
@each_kernel
def test_a_nan_stays_in_its_direction(backend, case):
    two = tangents(case, count=2)
    for name in two:
        two[name][1] = np.nan
    out, lse, out_dot, lse_dot = call_jvp(case, two, backend)
    for x in (out, lse, out_dot[0], lse_dot[0]):
        assert_finite(x.astype("f4"), "x")
    assert_all(out_dot[1].astype("f4"), np.nan, "out_dot")
    assert_all(lse_dot[1], np.nan, "lse_dot[1]")


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, [(1,)]),
        (2, [(2,)]),
        (5, [(2,), (1, "last")]),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("float32", 64), ("float32", 128), ("bfloat16", 64)],
)
def test_blocks_have_two_directions(dtype, head_dim, count, wanted):
    decided = jvp_plan(count, head_dim, dtype=dtype)
    assert in_turn(decided.launches) == wanted


def test_where_two_do_not_fit_others_read_the_first_ones_out():
    first, rest, _ = jvp_plan(4, 128, dtype="bfloat16").launches
    assert in_turn([first, rest]) == [(1, "first"), (1, "rest")]
    assert rest.blocks == 3 * first.blocks


def test_wide_heads_have_one():
    (launch,) = jvp_plan(4, 256).launches
    assert in_turn([launch]) == [(1,)]
    assert launch.blocks == 4 * jvp_plan(1, 256).launches[0].blocks


def test_block_sizes_may_be_those_of_one():
    """Two directions need more registers than this tile leaves."""
    decided = jvp_plan(4, 64, block_q=128, block_k=64)
    assert (decided.family, decided.tile.directions) == ("fma", 1)
