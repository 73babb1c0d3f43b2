"""What apply_rotary refuses, and what the message says."""

import numpy as np
import pytest

import cuflash
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request.validate import rotary as validate
from helpers.compare import assert_all
from helpers.dtypes import DTYPES

SHAPES = {"x": (2, 5, 3, 8), "cos": (6, 4), "sin": (6, 4),
          "positions": (2, 5)}  # fmt: skip


def good(dtype=np.float32, **changed):
    arrays = {name: np.zeros(SHAPES[name], dtype)
              for name in ("x", "cos", "sin")}  # fmt: skip
    return {**arrays, **changed}


def complaint(error, **changed):
    with pytest.raises(CuflashError) as caught:
        cuflash.apply_rotary(**good(**changed))
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("name", SHAPES)
def test_no_array(name):
    assert complaint(DTypeError, **{name: [0]}).startswith(
        f"{name} is of type list, expected an array:"
    )


def test_out_that_is_read_only():
    out = np.zeros(SHAPES["x"], np.float32)
    out.flags.writeable = False
    assert complaint(ValueRangeError, out=out) == (
        "out is read-only (numpy.ndarray (2, 5, 3, 8)), expected a writable "
        "array: it receives the result"
    )


# Dtypes ----------------------------------------------------------------------


def test_dtype_of_x():
    assert complaint(DTypeError, x=np.zeros(SHAPES["x"], int)) == (
        "x has dtype int64, expected float16, bfloat16, float32 or float64"
    )


def test_dtype_of_out():
    out = np.zeros(SHAPES["x"], np.float64)
    assert complaint(DTypeError, out=out) == (
        "out has dtype float64, expected float32 as in x: arrays of one call "
        "have one dtype"
    )


@pytest.mark.parametrize("name", ["cos", "sin"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", "float32 or float16"),
        ("bfloat16", "float32 or bfloat16"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_dtype_of_the_tables(name, dtype, expected):
    given = good(DTYPES[dtype])
    given[name] = given[name].astype(int)
    assert complaint(DTypeError, **given) == (
        f"{name} has dtype int64, expected {expected} as x has dtype {dtype}"
    )


def test_tables_of_two_dtypes():
    given = good(np.float16, cos=np.zeros((6, 4), np.float32))
    assert complaint(DTypeError, **given) == (
        "sin has dtype float16, expected float32 as cos"
    )


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_dtype_of_positions(dtype):
    positions = np.zeros(SHAPES["positions"], dtype)
    assert complaint(DTypeError, positions=positions) == (
        f"positions has dtype {dtype}, expected an integer dtype: convert "
        "positions to int32"
    )


@pytest.mark.parametrize("name", ["interleaved", "inverse"])
def test_flags(name):
    assert complaint(DTypeError, **{name: 1}) == (
        f"{name} is 1 of type int, expected True or False"
    )


# Shapes ----------------------------------------------------------------------


def test_rank_of_x():
    assert complaint(ShapeError, x=np.zeros(8, np.float32)) == (
        "x has 1 axis, expected 2, 3 or 4 (x (8,); layout is (seqlen, "
        "head_dim), (seqlen, heads, head_dim) or (batch, seqlen, heads, "
        "head_dim))"
    )


def test_shape_of_out():
    out = np.zeros((2, 5, 4, 8), np.float32)
    assert complaint(ShapeError, out=out) == (
        "out has heads 4, expected 3 as in x (x (2, 5, 3, 8), out (2, 5, 4, "
        "8); layout is (batch, seqlen, heads, head_dim))"
    )


def test_wide_heads():
    x = np.zeros((2, 5, 3, 577), np.float32)
    assert complaint(UnsupportedError, x=x).startswith(
        "x has head_dim 577, expected at most 576"
    )


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_rank_of_the_tables(name):
    assert complaint(ShapeError, **{name: np.zeros(6, np.float32)}) == (
        f"{name} has 1 axis, expected 2 ({name} (6,); layout is "
        "(num_positions, rotary_dim / 2))"
    )


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_columns_of_the_tables(name):
    assert complaint(ShapeError, **{name: np.zeros((6, 5), np.float32)}) == (
        f"{name} has 5 columns, expected at most 4: rotary_dim is twice as "
        f"many, and at most x's head_dim 8 (x (2, 5, 3, 8), {name} (6, 5))"
    )


def test_tables_of_two_shapes():
    assert complaint(ShapeError, sin=np.zeros((7, 4), np.float32)) == (
        "sin has shape (7, 4), expected (6, 4) as cos (layout is "
        "(num_positions, rotary_dim / 2))"
    )


def test_fewer_rows_than_tokens():
    tables = dict.fromkeys(("cos", "sin"), np.zeros((4, 4), np.float32))
    assert complaint(ShapeError, **tables) == (
        "cos has 4 rows, expected at least 5, x's seqlen: without positions, "
        "tokens are at 0, 1, 2, ..."
    )


@pytest.mark.parametrize("shape", [(2,), (5, 2), (3, 5), (1, 2, 5), (0,)])
def test_shape_of_positions(shape):
    positions = np.zeros(shape, np.int32)
    assert complaint(ShapeError, positions=positions) == (
        f"positions has shape {shape}, expected one that broadcasts to "
        "(2, 5) as in x (layout is (batch, seqlen))"
    )


def test_shape_of_positions_without_batch():
    x, positions = np.zeros((5, 3, 8), np.float32), np.zeros((1, 5), np.int32)
    assert complaint(ShapeError, x=x, positions=positions) == (
        "positions has shape (1, 5), expected one that broadcasts to (5,) as "
        "in x (layout is (seqlen,))"
    )


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (2, 1), (2, 5)])
def test_positions_broadcast(shape):
    positions = np.zeros(shape, np.int32)
    call = validate.apply_rotary(**good(), positions=positions)
    assert call.signature.options["positions"].shape == (2, 5)


# Values and memory -----------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_a_position_outside_the_tables(bad):
    positions = np.zeros((2, 5), np.int64)
    positions[1, 3] = bad
    x = np.ones(SHAPES["x"], np.float32)
    assert complaint(ValueRangeError, x=x, positions=positions, out=x) == (
        f"positions[1, 3] is {bad}, expected 0 to less than 6, the rows of cos"
    )
    assert_all(x, 1, "x")


class OnDevice:
    """An array whose values must be fetched."""

    def __init__(self, values):
        self.values = values

    def get(self):
        return self.values


def test_positions_on_a_device_are_read_only_to_check_them(monkeypatch):
    positions = np.full((2, 5), 9, np.int64)
    call = validate.apply_rotary(**good(), positions=positions)
    call.options["positions"] = OnDevice(positions)
    with pytest.raises(ValueRangeError, match=r"positions\[0, 0\] is 9"):
        validate.positions(call)
    monkeypatch.delenv("CUFLASH_CHECK", raising=False)
    assert not cuflash.api.arrays.reads_values(OnDevice(positions))
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    assert cuflash.api.arrays.reads_values(OnDevice(positions))


def test_out_shares_a_part_of_x():
    room = np.zeros((3, 5, 3, 8), np.float32)
    assert complaint(ValueRangeError, x=room[:2], out=room[1:]) == (
        "out shares memory with x, expected separate memory: x is read while "
        "out is written"
    )


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_out_shares_memory_with_a_table(name):
    room = np.zeros(2 * 5 * 3 * 8, np.float32)
    given = {name: room[:24].reshape(6, 4), "out": room.reshape(SHAPES["x"])}
    assert complaint(ValueRangeError, **given).startswith(
        f"out shares memory with {name},"
    )


def test_out_that_is_x_and_overlaps_itself():
    x = np.lib.stride_tricks.as_strided(
        np.zeros(100, np.float32), SHAPES["x"], (32, 4, 16, 4)
    )
    text = complaint(ValueRangeError, x=x, out=x)
    assert text.startswith("out has elements that share memory")


def test_the_problem_holds_every_argument():
    call = validate.apply_rotary(
        **good(np.float16), positions=np.zeros(5, np.int64), inverse=True
    )
    p, rotary = call.problem, call.problem.rotary
    assert (p.direction, p.dtype, p.batch, p.seqlen_q, p.num_heads_q) == (
        "rotary", "float16", 2, 5, 3,
    )  # fmt: skip
    assert (rotary.rotary_dim, rotary.num_positions) == (8, 6)
    assert (rotary.tables, rotary.positions) == ("float16", "int64")
    assert (rotary.interleaved, rotary.inverse) == (False, True)


def test_tables_of_full_width():
    """As Transformers has them."""
    wide = np.zeros((6, 8), np.float32)
    assert complaint(ShapeError, cos=wide, sin=wide).endswith(
        "; if it holds each angle twice, as in Transformers, pass cos[..., :4]"
    )


def test_tables_of_a_batch():
    cos = np.zeros((1, 6, 4), np.float32)
    assert complaint(ShapeError, cos=cos).endswith(": pass cos[0]")
