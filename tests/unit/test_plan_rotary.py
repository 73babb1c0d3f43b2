"""The plan of apply_rotary: a warp for each head of a token."""

import pytest

from cuflash.errors import UnsupportedError
from cuflash.plans.plan import device_of_arch, plan
from cuflash.request.problem import Problem, Rotary


def rotary_plan(heads=8, dtype="bfloat16", arch="sm_90a", **changed):
    given = {"tables": "float32", "positions": "int32", **changed}
    rotary = Rotary(64, 128, interleaved=False, inverse=False, **given)
    return plan(
        Problem(
            "rotary", dtype, 2, 5, 0, heads, heads, 128, 128, 1.0,
            rotary=rotary,
        ),
        device_of_arch(arch),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "warps", "blocks"),
    [(1, 1, 10), (2, 2, 10), (3, 2, 20), (7, 4, 20), (8, 8, 10), (20, 8, 30)],
)
def test_a_block_has_a_power_of_two_of_heads(heads, warps, blocks):
    (launch,) = rotary_plan(heads).launches
    assert launch.kernel.threads == 32 * warps
    assert ("NUM_THREADS", 32 * warps) in launch.kernel.constants
    assert launch.blocks == blocks


@pytest.mark.parametrize(
    ("tables", "positions", "table", "index"),
    [
        ("float32", None, "float", "int"),
        ("float64", "int64", "double", "i64"),
        ("bfloat16", "int32", "bfloat16", "int"),
    ],
)
def test_types_of_the_tables(tables, positions, table, index):
    (kernel,) = rotary_plan(tables=tables, positions=positions).kernels
    assert {("Table", table), ("Index", index)} <= {*kernel.constants}


def test_a_device_that_is_too_old():
    with pytest.raises(UnsupportedError, match="^bfloat16 needs a GPU of"):
        rotary_plan(arch="sm_70")
    assert rotary_plan(arch="sm_75").launches
