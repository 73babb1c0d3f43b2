"""Rotation of queries or keys by their kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cuflash.backends.base import Backend
from cuflash.launch import rows
from cuflash.request.problem import Call, Signature, strip
from cuflash.request.validate import memory
from cuflash.request.validate import rotary as validate

from .signature import checked, describe


def apply_rotary(
    backend: Backend,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    inverse: bool,
    inplace: bool,
) -> torch.Tensor:
    """`cuflash.apply_rotary`, without a gradient.

    Parameters
    ----------
    backend : Backend
        Of the device of all tensors.
    x : Tensor, (batch, seqlen, heads, head_dim)
        Also 3-D or 2-D, unless it is changed in place.
    cos, sin : Tensor, (num_positions, rotary_dim / 2)
    positions : Tensor, (batch, seqlen), or None
    interleaved, inverse : bool
    inplace : bool
        Whether to write the result to `x`.
    """
    tables = {"cos": cos, "sin": sin}
    if positions is not None:
        tables["positions"] = positions
    given = {"x": x, **tables}
    described = tuple(describe(name, array) for name, array in given.items())
    signature = checked(
        _in_place if inplace else validate.apply_rotary, described,
        "interleaved", interleaved, "inverse", inverse,
    )  # fmt: skip
    out = x if inplace else None
    result = rows.apply_rotary(Call(signature, {"x": x}, out, tables), backend)
    if inplace and not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return strip(result, signature.rank)


def _in_place(**arguments: Any) -> Signature:
    """The signature of a call that writes its result to x."""
    signature = validate.apply_rotary(**arguments).signature
    layout = signature.layouts["x"]
    memory.check_elements_apart(
        "x", layout.shape, layout.strides, layout.dtype.itemsize
    )
    return replace(signature, layouts={**signature.layouts, "out": layout})
