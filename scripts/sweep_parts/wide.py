"""Checks float32 and float64 tiles by the bounds of docs/guide/accuracy.md.

Like fuzz_parts/large.py, whose bounds are for 16 bits: some key heads with all
their query heads are recomputed in float64 on the GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import cupy

import bounded_attention
from bounded_attention import Results
from fuzz_parts import large
from fuzz_parts.shapes import Shape

NAMES = Results._fields


class Expected(NamedTuple):
    """A key head's expected results, and their bounds."""

    batch: int
    head: int
    results: Results
    bounds: Results


def check(shape: Shape) -> dict[str, float]:
    """Call cuflash; return each result's largest error / bound.

    Raises
    ------
    large.WrongResult
        If one is above 1, or NaN.
    """
    inputs, expected = prepared(shape)
    got = large.results(shape, inputs)
    ratios = dict.fromkeys(NAMES, 0.0)
    for batch, head, results, bounds in expected:
        ours = large.parts_of_group(shape, got, batch, head)
        for name, *pair in zip(NAMES, results, bounds, strict=True):
            ratio = bounded_attention.over_bound(ours[name], *pair)
            if not ratio <= 1:
                raise large.WrongResult(
                    f"{name} is off by {ratio:.3g} of its bound"
                )
            ratios[name] = max(ratios[name], ratio)
    return ratios


@functools.lru_cache(maxsize=2)  # all tiles of a group have the same shapes
def prepared(shape: Shape) -> tuple[large.Arrays, list[Expected]]:
    """Inputs, and expected results."""
    inputs = large.make_inputs(shape)
    return inputs, [
        Expected(batch, head, *of_group(shape, inputs, batch, head))
        for batch, head in large.chosen(shape)
    ]


def of_group(
    shape: Shape, inputs: large.Arrays, batch: int, head: int
) -> tuple[Results, Results]:
    """A key head's results and bounds, in the layout of parts_of_group."""
    cut = large.parts_of_group(shape, inputs, batch, head)
    each = [
        bounded_attention.attend(
            cut["q"][:, i], cut["k"], cut["v"], cut["dout"][:, i],
            scale=shape.scale, causal=shape.causal,
            kind=shape.precision or shape.dtype, group=shape.group_size,
            xp=cupy,
        )
        for i in range(shape.group_size)
    ]  # fmt: skip
    return tuple(map(_together, zip(*each, strict=True)))


def _together(heads: tuple[Results, ...]) -> Results:
    out, lse, dq, dk, dv = zip(*heads, strict=True)
    stack = cupy.stack
    return Results(
        stack(out, axis=1), stack(lse), stack(dq, axis=1), sum(dk), sum(dv)
    )
