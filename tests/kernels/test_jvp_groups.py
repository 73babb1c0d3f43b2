"""mma8's jvp whose warps form two groups that take turns at the key tiles."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import Tangents
from helpers.backends import on_kernels
from helpers.compare import (
    assert_allclose,
    assert_arrays_equal,
    assert_elements,
)
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import (
    EVERYTHING,
    GROUPED,
    INPUTS,
    assert_near,
    call_jvp,
    exact_jvp,
    tangents,
)
from helpers.kernels import small_problem

# Two warps for 16 queries, a group each.
TILE = {"block_q": 16, "block_k": 16}
ON = Emulation("sm_80", seed=3)
MOVING = Tangents(("q", "k", "v"))


def jvp_plan(head_dim, dtype="float64", arch="sm_90a", **fields):
    problem = small_problem("jvp", dtype, head_dim, tangents=MOVING, **fields)
    return plan(problem, device_of_arch(arch))


def assert_is_the_references(backend, case, names=INPUTS):
    direction = tangents(case, names)
    _, _, *got = call_jvp(case, direction, backend)
    want = exact_jvp(case, direction)
    assert_near(dict(zip(want, got, strict=True)), want, case)


def test_wide_float64_tiles_have_two_groups():
    """Of four warps each, as many as 64 queries have tiles of 16 rows."""
    decided = jvp_plan(128)
    assert decided.family == "mma8_float64"
    tile = decided.tile
    assert (tile.block_q, tile.block_k, tile.num_warps) == (64, 16, 8)
    tile = jvp_plan(64).tile
    assert tile.num_warps * 16 == tile.block_q  # one group


def test_groups_share_queries():
    """Both have the queries, and each one buffer of keys or of values."""
    kernels = [jvp_plan(24, arch="sm_80", **TILE).kernels[-1]]
    tile = jvp_plan(24, arch="sm_80", **TILE).tile
    assert tile.num_warps == 2
    columns = 32 + 4  # padded
    rows = 16 + 2 * 16  # queries; keys of two groups
    votes = 2 * 16  # bytes
    assert kernels[0].shared_bytes == 2 * 8 * rows * columns + votes


@on_kernels
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "fields", [GROUPED, EVERYTHING], ids=["grouped", "everything"]
)
def test_are_the_references(backend, dtype, fields):
    precision = "tf32x3" if dtype == "float32" else None
    case = Case(dtype, precision=precision, on=ON, **TILE, **fields)
    assert_is_the_references(backend, case)


@on_kernels
@pytest.mark.parametrize("moving", ["q", "k", "qkv"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_operands_are_loaded_a_step_ahead(backend, dtype, moving):
    """Of wide heads: those that move, and those that do not."""
    precision = "tf32x3" if dtype == "float32" else None
    case = Case(dtype, 1, 20, 33, 2, 1, 72, 8, precision=precision, on=ON,
                **TILE)  # fmt: skip
    assert_is_the_references(backend, case, moving)


@on_kernels
@pytest.mark.parametrize("seqlen_k", [16, 17, 33])
def test_a_group_may_have_no_keys(backend, seqlen_k):
    """Or as many tiles as the other, or one less."""
    case = Case("float64", 1, 20, seqlen_k, 2, 1, 8, 8, on=ON, **TILE)
    assert_is_the_references(backend, case)


@on_kernels
def test_a_nan_in_one_groups_values_reaches_the_rows_that_read_it(backend):
    case = Case("float64", 1, 70, 70, 1, 1, 8, 8, window=(30, 5), on=ON,
                **TILE)  # fmt: skip
    for token in (20, 40):  # of different groups' tiles
        v = inputs(case)[2]
        v[0, token] = np.nan
        *_, out_dot, _ = call_jvp(case, tangents(case, "qkv"), backend, v=v)
        query = np.arange(70)
        reads = (query >= token - 5) & (query <= token + 30)
        finite = np.isfinite(out_dot[0]).all(axis=(1, 2))
        assert_elements(finite, ~reads, "finite")


@on_kernels
def test_packed_sequences_in_groups(backend):
    case = Case(
        "float64", 1, 38, 57, 2, 1, 8, 8, causal=True,
        offsets=((0, 0, 20, 38), (0, 9, 42, 57)), on=ON, **TILE,
    )  # fmt: skip
    q, k, v, _ = (x[0] for x in inputs(case))
    given = {"q": q, "k": k, "v": v}
    directions = {x: y[0] for x, y in tangents(case).items()}
    *_, out_dot, lse_dot = call_jvp(case, directions, backend, **given)
    want = call_jvp(case, directions, **given)[2:]
    for got, exact in zip((out_dot, lse_dot), want, strict=True):
        assert_allclose(got, exact, "got", atol=1e-13)


@on_kernels
def test_groups_of_other_seeds_agree(backend):
    """Whichever group is ahead."""
    case = Case("float64", 1, 16, 90, 1, 1, 8, 8, on=ON, **TILE)
    first, *others = (
        call_jvp(
            replace(case, on=replace(ON, seed=n)), tangents(case), backend
        )
        for n in range(4)
    )
    for results in others:
        for a, b in zip(results, first, strict=True):
            assert_arrays_equal(a, b, "a")
