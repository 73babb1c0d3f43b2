"""The arguments of `cuflash.apply_rotary`, and tables of cos and sin."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from cuflash.errors import DTypeError, ShapeError, ValueRangeError
from cuflash.request import checks
from cuflash.request.layouts import broadcasts
from cuflash.request.problem import Call, Layout, Rotary, Signature
from cuflash.request.validate.descriptions import (
    describe,
    layout_of,
    remembered,
)
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.host_values import first, on_host
from cuflash.request.validate.memory import check_apart, is_same
from cuflash.request.validate.shapes import (
    AXES,
    Arrays,
    axes_in_words,
    check_integers,
)


def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    positions: Any = None,
    interleaved: Any = False,
    inverse: Any = False,
    out: Any = None,
) -> Call:
    """Check the arguments of `cuflash.apply_rotary`; see there."""
    given = {"x": x}
    tables = {"cos": cos, "sin": sin}
    if positions is not None:
        tables["positions"] = positions
    arrays = given if out is None else {**given, "out": out}
    signature = _rotary(
        describe(arrays),
        describe(tables),
        checks.flag("interleaved", interleaved),
        checks.flag("inverse", inverse),
    )
    if out is not None:
        read = tables if is_same(x, out) else {**given, **tables}
        check_apart({"out": out}, read)
    return Call(signature, given, out, tables)


@remembered
def _rotary(
    seen: tuple[tuple, ...],
    tables: tuple[tuple, ...],
    interleaved: bool,
    inverse: bool,
) -> Signature:
    """Check an apply_rotary call."""
    check_one_device(seen + tables)
    arrays = Arrays(seen)
    if "out" in arrays.shapes:
        arrays.check_same("out", AXES, "x")
    arrays.check_lengths("x")
    arrays.check_head_dim("x")
    seqlen = arrays.full["x"][1]
    layouts = _check_tables(arrays, tables)
    num_positions, _ = layouts["cos"].shape
    if "positions" not in layouts and seqlen > num_positions:
        raise ShapeError(
            f"cos has {num_positions} rows, expected at least {seqlen}, x's "
            "seqlen: without positions, tokens are at 0, 1, 2, ..."
        )
    rotary = rotary_of(
        layouts["cos"], layouts.get("positions"), interleaved, inverse
    )
    problem = arrays.problem(
        "rotary", "x", "x", seqlen_k=0, scale=1.0, rotary=rotary
    )
    return Signature(problem, arrays.rank, arrays.layouts(), options=layouts)


def _check_tables(
    arrays: Arrays, tables: tuple[tuple, ...]
) -> dict[str, Layout]:
    """The layouts of cos and sin, and of positions, (batch, seqlen)."""
    layouts = check_cos_and_sin(arrays, tables[:2])
    for seen in tables[2:]:
        name, shape, _, dtype, *_ = seen
        check_integers(name, dtype)
        full = arrays.full["x"][:2]
        _check_positions_shape(tuple(shape), full, arrays.rank)
        layouts[name] = layout_of(seen, full)
    return layouts


def rotary_of(
    cos: Layout,
    positions: Layout | None,
    interleaved: bool,
    inverse: bool = False,
) -> Rotary:
    """The rotation by checked tables, and positions if they are given."""
    num_positions, num_pairs = cos.shape
    index: Literal["int32", "int64"] | None = None
    if positions is not None:  # see `layouts.by_element`
        index = "int32" if positions.dtype.name == "int32" else "int64"
    return Rotary(
        2 * num_pairs, num_positions, cos.dtype.name, index, interleaved,
        inverse,
    )  # fmt: skip


def check_cos_and_sin(
    arrays: Arrays, tables: tuple[tuple, ...]
) -> dict[str, Layout]:
    """The layouts of two tables that rotate the first array."""
    floats = dict.fromkeys((arrays.lse_dtype, arrays.dtype))
    x = arrays.first
    for name, shape, _, dtype, *_ in tables:
        got = np.dtype(dtype).name
        if got not in floats:
            raise DTypeError(
                f"{name} has dtype {got}, expected {' or '.join(floats)} as "
                f"{x} has dtype {arrays.dtype}"
            )
        _check_table_shape(name, tuple(shape), x, arrays.shapes[x])
    layouts = {seen[0]: layout_of(seen) for seen in tables}
    (first, cos), (second, sin) = layouts.items()
    if sin.dtype.name != cos.dtype.name:
        raise DTypeError(
            f"{second} has dtype {sin.dtype.name}, expected "
            f"{cos.dtype.name} as {first}"
        )
    if sin.shape != cos.shape:
        raise ShapeError(
            f"{second} has shape {sin.shape}, expected {cos.shape} as "
            f"{first} ({_LAYOUT_OF_TABLES})"
        )
    return layouts


_LAYOUT_OF_TABLES = "layout is (num_positions, rotary_dim / 2)"


def _check_table_shape(
    name: str, shape: tuple[int, ...], x: str, full: tuple[int, ...]
) -> None:
    if len(shape) != 2:
        one = len(shape) == 3 and shape[0] == 1
        raise ShapeError(
            f"{name} has {axes_in_words(len(shape))}, expected 2 "
            f"({name} {shape}; {_LAYOUT_OF_TABLES})"
            f"{f': pass {name}[0]' if one else ''}"
        )
    if 2 * shape[1] > full[-1]:
        twice = shape[1] % 2 == 0 and shape[1] <= full[-1]
        advice = (
            f"; if it holds each angle twice, as in Transformers, pass "
            f"{name}[..., :{shape[1] // 2}]"
        )
        raise ShapeError(
            f"{name} has {shape[1]} columns, expected at most "
            f"{full[-1] // 2}: rotary_dim is twice as many, and at most "
            f"{x}'s head_dim {full[-1]} ({x} {full}, {name} {shape})"
            f"{advice if twice else ''}"
        )


def _check_positions_shape(
    shape: tuple[int, ...], full: tuple[int, ...], rank: int
) -> None:
    words = "(batch, seqlen)" if rank == 4 else "(seqlen,)"
    full = full if rank == 4 else full[1:]
    if not broadcasts(shape, full):
        raise ShapeError(
            f"positions has shape {shape}, expected one that broadcasts to "
            f"{full} as in x (layout is {words})"
        )


def positions(call: Call) -> None:
    """Raise ValueRangeError if a position is not a row of cos and sin.

    It reads the positions, so it waits for the device.
    """
    given, rotary = call.options.get("positions"), call.problem.rotary
    if given is None or rotary is None:
        return
    values = on_host(given)
    at = first((values < 0) | (values >= rotary.num_positions))
    if at is not None:
        index = ", ".join(map(str, at))
        raise ValueRangeError(
            f"positions[{index}] is {values[at]}, expected 0 to less than "
            f"{rotary.num_positions}, the rows of cos"
        )
