"""Rotation of queries or keys by their kernel."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from cuflash.backends.base import Backend
from cuflash.launch import rows
from cuflash.request.problem import Call, Signature, strip
from cuflash.request.validate import memory
from cuflash.request.validate import rotary as validate

from .signature import Described, checked, describe


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
    signature = _signature(
        describe("x", x),
        tuple(describe(name, table) for name, table in tables.items()),
        interleaved,
        inverse,
        inplace,
    )
    out = x if inplace else None
    result = rows.apply_rotary(Call(signature, {"x": x}, out, tables), backend)
    if inplace and not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return strip(result, signature.rank)


# Cached, because recipes are found by the signature's identity.
@functools.lru_cache(maxsize=4096)
def _signature(
    x: Described,
    tables: tuple[Described, ...],
    interleaved: bool,
    inverse: bool,
    inplace: bool,
) -> Signature:
    signature = checked(
        validate.apply_rotary, (x, *tables),
        "interleaved", interleaved, "inverse", inverse,
    )  # fmt: skip
    if not inplace:
        return signature
    layout = signature.layouts["x"]
    memory.check_elements_apart(
        "x", layout.shape, layout.strides, layout.dtype.itemsize
    )
    return replace(signature, layouts={**signature.layouts, "out": layout})
