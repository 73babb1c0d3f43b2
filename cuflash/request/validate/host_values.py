"""Values of arrays that the host reads: offsets, and integers as int32."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.errors import ValueRangeError
from cuflash.request.problem import Call


def integers_on_host(name: str, array: np.ndarray) -> np.ndarray:
    """An array of integers as int32, positions as int64 where they are wide.

    Raises
    ------
    ValueRangeError
        If a number does not fit.
    """
    dtype = array.dtype
    if dtype == np.int32 or dtype.kind not in "iu":  # checked later
        return array
    wide = np.int64 if name == "positions" else np.int32
    low, high = np.iinfo(wide).min, np.iinfo(wide).max
    if not np.can_cast(dtype, wide) and array.size:
        for value in (int(array.min()), int(array.max())):
            if not low <= value <= high:
                raise ValueRangeError(
                    f"{name} holds {value}, expected {low} to {high}: kernels "
                    f"read {name} as {np.dtype(wide).name}"
                )
    return array.astype(wide)


def offsets(call: Call) -> None:
    """Raise ValueRangeError if the offsets of packed sequences are invalid.

    It reads the offsets, so it waits for the device.
    """
    p = call.problem
    if p.num_sequences is None:
        return
    for name, total, longest in (
        ("cu_seqlens_q", p.seqlen_q, p.max_seqlen_q),
        ("cu_seqlens_k", p.seqlen_k, p.max_seqlen_k),
    ):
        values = on_host(call.options[name])
        check_offsets(name, values.tolist(), total, longest)


def on_host(array: Any) -> np.ndarray:
    """An array's values; waits for its device."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def first(bad: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True."""
    if not bad.any():
        return None
    return tuple(map(int, np.unravel_index(bad.argmax(), bad.shape)))


def check_offsets(
    name: str, values: list[int], total: int, longest: int | None
) -> None:
    """Raise ValueRangeError if offsets are invalid; `total` tokens exist."""
    before = 0
    for index, value in enumerate(values):
        expected = None
        if index == 0 and value:
            expected = "0 (of lengths, pass cuflash.cu_seqlens(lengths))"
        elif value < before:
            expected = f"at least {before}, the one before"
        elif value > total:
            expected = f"at most {total}, the number of tokens"
        elif longest is not None and value - before > longest:
            expected = (
                f"at most {before + longest}: no sequence is longer than "
                f"max_seqlen_{name[-1]}"
            )
        if expected:
            raise ValueRangeError(
                f"{name}[{index}] is {value}, expected {expected}"
            )
        before = value
