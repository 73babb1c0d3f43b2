"""Sums and merges of many contributions round to the result's dtype once."""

import numpy as np
import pytest

from cuflash.distributed.accumulate import Merged, Sums
from cuflash.distributed.machine import Host
from helpers.compare import assert_all, assert_elements, assert_within
from helpers.dtypes import DTYPES, PRECISION, lse_dtype

LENGTH, FIRST, SECOND = 12, range(6), range(6, 12)
WHOLE = range(LENGTH)
# The rows of each of the contributions: more than one pass combines.
KINDS = {
    "whole": [WHOLE] * 16,
    "chunks": [FIRST, SECOND] * 16,
    "both": [SECOND, WHOLE, FIRST] * 8,
    "parts": [WHOLE, range(3, 9), FIRST, range(5, 7)] * 5,
    "second chunk": [SECOND] * 16,
}
on_kinds = pytest.mark.parametrize("kind", KINDS)
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def contributions(kind, dtype):
    """Return (rows, array) of each; elements are multiples of the unit.

    They are at most 1, so that the dtype holds them, and float32 (float64)
    their sums: of 24 at most, multiples of 32 of its units or more.
    """
    rng, precision = np.random.default_rng(3), PRECISION[dtype]
    steps = round(1 / max(precision.unit, 32 * precision.sum_unit / 2))
    for rows in KINDS[kind]:
        numbers = rng.integers(-steps, steps, (2, len(rows), 3, 16))
        yield rows, (numbers / steps).astype(DTYPES[dtype])


def new(kind, dtype, result=Sums):
    """An empty result of all rows."""
    shape = 2, LENGTH, 3, 16
    chunks = [FIRST, SECOND]
    return result(Host(), shape, DTYPES[dtype], chunks, KINDS[kind])


@on_dtypes
@on_kinds
def test_sums_are_rounded_once(kind, dtype):
    sums, exact = new(kind, dtype), np.zeros((2, LENGTH, 3, 16))
    for rows, array in contributions(kind, dtype):
        exact[:, rows.start : rows.stop] += array
        sums.add(rows, array)
    got = sums.result()
    assert got.dtype == DTYPES[dtype]
    assert_elements(got, exact.astype(got.dtype), "sum", kind)


@on_dtypes
@on_kinds
def test_merges_are_rounded_once(kind, dtype):
    """To the result's dtype, from sums of float32 (float64).

    With |lse| < 1 and u the unit of float32, a pass's weights are within 16 u
    of their own size (an argument below 8, exp, three sums, a quotient), and
    its lse is within 16 u (log, and a sum below 8). What is merged is at most
    1, so that a pass adds 32 u at most. It combines four arrays (of 16, five
    passes), or two where rows are a part of a range.
    """
    merged, wide = new(kind, dtype, Merged), lse_dtype(DTYPES[dtype])
    total, exact = np.zeros((2, LENGTH, 3)), np.zeros((2, LENGTH, 3, 16))
    rng = np.random.default_rng(4)
    for rows, out in contributions(kind, dtype):
        lse = rng.uniform(-1, 1, (2, 3, len(rows))).astype(wide)
        own = slice(rows.start, rows.stop)
        weight = np.exp(lse.astype(np.float64)).swapaxes(1, 2)
        total[:, own] += weight
        exact[:, own] += weight[..., None] * out
        merged.merge(rows, out, lse)
    exact /= np.where(total, total, 1)[..., None]
    got, unit = merged.result(), PRECISION[dtype].unit
    passes = len(KINDS[kind]) if kind == "parts" else 5
    small = passes * 32 * PRECISION[dtype].sum_unit / 2
    assert got.dtype == DTYPES[dtype]
    assert_within(got, exact, unit * np.abs(exact) + small, "out", kind)
    with np.errstate(divide="ignore"):
        log = np.log(total).swapaxes(1, 2)
    assert_within(merged.lse, log, small, "lse", kind)


def test_rows_without_a_contribution():
    merged = new("second chunk", "float16", Merged)
    for rows, out in contributions("second chunk", "float16"):
        merged.merge(rows, out, np.zeros((2, 3, len(rows)), np.float32))
    assert_all(merged.result()[:, :6], 0, "out")
    assert_all(merged.lse[..., :6], -np.inf, "lse")
