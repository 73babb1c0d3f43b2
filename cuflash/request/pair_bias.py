"""Shapes of triangle attention and pair bias, whichever library's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.errors import DTypeError, ShapeError

from . import checks

Shapes = Mapping[str, tuple[int, ...]]

AXES = "(batch, rows, heads, seqlen, head_dim)"


def check_triangle(shapes: Shapes, axes: str = "5") -> None:
    """Check q, k, v, bias and, if it is there, mask.

    axes : how many q may have, in words.
    """
    q = shapes["q"]
    if len(q) != 5:
        raise ShapeError(f"q has {len(q)} axes, expected {axes}: {AXES}")
    batch, rows, heads, seqlen_q, head_dim = q
    seqlen_k = shapes["k"][3] if len(shapes["k"]) == 5 else 0
    expected = {
        "q": q,
        "k": (batch, rows, heads, seqlen_k, head_dim),
        "v": (batch, rows, heads, seqlen_k, head_dim),
        "bias": (batch, 1, heads, seqlen_q, seqlen_k),
        "mask": (batch, rows, 1, 1, seqlen_k),
    }
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ShapeError(
                f"{name} has shape {shape}, expected {expected[name]}: q has"
                f" {q}, which is {AXES}"
            )


def check_projection(w_proj_z: Any, is_cached_z_proj: bool) -> None:
    """Check that z can be projected, unless it is already."""
    if w_proj_z is None and not is_cached_z_proj:
        raise DTypeError(
            "w_proj_z is None, expected an array unless is_cached_z_proj=True"
        )


def multiplicity_of(shapes: Shapes, num_heads: Any) -> int:
    """Check q, k, bias and, if it is there, mask, of (batch, heads, ..).

    Returns how many elements of q's batch share a bias; 1 if it is empty.
    """
    checks.whole("num_heads", num_heads, 0, None)
    q, k, bias = (shapes[x] for x in ("q", "k", "bias"))
    if len(q) != 4 or q[1] != num_heads:
        raise ShapeError(
            f"q has shape {q}, expected (batch, {num_heads}, seqlen_q,"
            f" head_dim): num_heads is {num_heads}"
        )
    seqlen_k = k[2] if len(k) == 4 else 0
    expected = num_heads, q[2], seqlen_k
    if len(bias) != 4 or bias[1:] != expected:
        raise ShapeError(
            f"z gives a bias of shape {bias}, expected (batch,"
            f" {', '.join(map(str, expected))}): heads, seqlen_q, seqlen_k"
        )
    rows, batch = q[0], bias[0]
    multiplicity, rest = divmod(rows, max(batch, 1))
    if rest or (rows == 0) != (batch == 0):
        raise ShapeError(
            f"q has batch {rows}, expected a multiple of that of z, {batch}"
        )
    masks = [(x, seqlen_k) for x in dict.fromkeys((batch, rows))]
    if "mask" in shapes and shapes["mask"] not in masks:
        raise ShapeError(
            f"mask has shape {shapes['mask']}, expected"
            f" {' or '.join(map(str, masks))}: a row for each element of z,"
            " or of q"
        )
    return max(multiplicity, 1)


def check_gate(q: tuple[int, ...], shapes: Shapes) -> None:
    """Check what gates and projects a result, which would broadcast.

    shapes : of s, w_proj_g and w_proj_o; of b_proj_g and b_proj_o, if there.
    """
    rows, heads, seqlen_q, head_dim = q
    columns = heads * head_dim
    width, of_out = shapes["s"][-1:], shapes["w_proj_o"][:1]
    expected = {
        "s": (rows, seqlen_q, *width),
        "w_proj_g": (columns, *width),
        "b_proj_g": (columns,),
        "w_proj_o": (*of_out, columns),
        "b_proj_o": of_out,
    }
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ShapeError(
                f"{name} has shape {shape}, expected {expected[name]}: q has"
                f" {q}, heads * head_dim is {columns}, and s has {shapes['s']}"
            )
