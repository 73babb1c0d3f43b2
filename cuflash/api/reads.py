"""What a call's score_mod and mask_mod read; what calls share of a mask.

CUFLASH_CHECK=1 refuses reads outside the arrays of `mod_arrays`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash import settings
from cuflash.api.tile_mask import share
from cuflash.errors import ValueRangeError
from cuflash.request import traced
from cuflash.request.problem import Call


def look_at_functions(
    call: Call,
    mask_mod: Any,
    asked: Mapping[str, Any],
    arrays: Mapping[str, Any],
) -> None:
    """Let a call share its mask's tiles, and check what its functions read.

    Parameters
    ----------
    call : Call
    mask_mod : callable
        As the user passed it.
    asked, arrays : dict
        The call's other arguments.
    """
    p = call.problem
    if p.score_mod is p.mask_mod is None:
        return
    given = {**arrays, **asked}
    share(call, mask_mod, given)
    _check_reads(call, given)


def _check_reads(call: Call, asked: Mapping[str, Any]) -> None:
    """Check what a user's functions read of NumPy arrays, if it is asked for.

    Masked pairs may read outside, and so may what a function drops.

    Parameters
    ----------
    call : Call
        With a `score_mod` or a `mask_mod`.
    asked : dict
        Its arguments.

    Raises
    ------
    ValueRangeError
    """
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
