"""CUFLASH_CHECK=1: refuse reads outside the arrays of `mod_arrays`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash import settings
from cuflash.errors import ValueRangeError
from cuflash.request import traced
from cuflash.request.problem import Call


def check_reads(call: Call, asked: Mapping[str, Any]) -> None:
    """Check what a user's functions read of NumPy arrays, if it is asked for.

    Masked pairs may read outside, and so may what a function drops.

    Parameters
    ----------
    call : Call
    asked : dict
        Its arguments.

    Raises
    ------
    ValueRangeError
    """
    p = call.problem
    if p.score_mod is p.mask_mod is None:
        return
    on_host = isinstance(call.given["q"], np.ndarray)
    if not on_host or settings.read("CUFLASH_CHECK") != "1":
        return
    from cuflash.backends.numpy import reads

    read = reads.find(call)
    if read is None:
        return
    shape = call.options[traced.slot(read.gather.value[0])].shape
    axis, index, size = next(
        (axis, index, size)
        for axis, (index, size) in enumerate(
            zip(read.indices, shape, strict=True)
        )
        if not -size <= index < size
    )
    pair = ", ".join(f"{x}={y}" for x, y in read.pair.items())
    expected = f"{-size} to {size - 1}" if size else "none: it is empty"
    raise ValueRangeError(
        f"{traced.place_of_read(asked, read.role, read.gather)} has shape"
        f" {shape} and is read at {list(read.indices)} for {pair}: along axis"
        f" {axis} index {index} is outside, expected {expected}."
        " CUFLASH_CHECK=1 refuses what reads 0; masked pairs and what"
        " np.where, & and | drop may be outside"
    )
