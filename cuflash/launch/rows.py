"""Runs checked calls that treat each row alone: merge_states, apply_rotary."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.backends.base import Backend, Target
from cuflash.launch.recipe import (
    Recipe,
    decide,
    layouts_of,
    recipe_of,
    remembered,
)
from cuflash.launch.results import lse_shape_of, out_shape_of
from cuflash.launch.run import run
from cuflash.plans.plan import FamilyName
from cuflash.request import layouts
from cuflash.request.problem import Call, Rotary, Signature


def merge_states(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a merge_states call: out and lse in full rank."""
    signature, target = call.signature, backend.target
    p, dtype = signature.problem, signature.layouts["out_a"].dtype
    lse_shape = lse_shape_of(p)
    with backend.current():
        out = backend.empty(out_shape_of(p), dtype)
        lse = backend.empty(lse_shape, p.lse_dtype)
        if 0 not in lse_shape:
            recipe = _merge_recipe(signature, target, target.family)
            run(recipe, call, backend, {"out": out, "lse": lse})
    return out, lse


@remembered
def _merge_recipe(
    signature: Signature, target: Target, family: FamilyName | None
) -> Recipe:
    p, given = signature.problem, signature.layouts
    states = [*given]  # out_a, lse_a, out_b, ...
    sources = {f"outs[{i}]": name for i, name in enumerate(states[::2])}
    sources |= {f"lses[{i}]": name for i, name in enumerate(states[1::2])}
    return recipe_of(
        signature,
        target,
        decide(p, target, family),
        given,
        {name: layouts.contiguous(x) for name, x in given.items()},
        ("out", "lse"),
        {
            "batch": p.batch,
            "seqlen_q": p.seqlen_q,
            "num_heads_q": p.num_heads_q,
            "head_dim_v": p.head_dim_v,
            "num_states": p.num_states,
        },
        sources=sources,
    )


def apply_rotary(call: Call, backend: Backend) -> Any:
    """Run an apply_rotary call: out in full rank."""
    signature, out, target = call.signature, call.out, backend.target
    layout = signature.layouts["x"]
    with backend.current():
        if out is None:
            out = backend.empty(layout.shape, layout.dtype)
        if 0 not in layout.shape:
            recipe = _rotary_recipe(signature, target, target.family)
            run(recipe, call, backend, {"out": out})
    return out


@remembered
def _rotary_recipe(
    signature: Signature, target: Target, family: FamilyName | None
) -> Recipe:
    p, given = signature.problem, layouts_of(signature)
    rotary = p.rotary
    assert rotary is not None
    x = given["x"]
    given.setdefault("out", layouts.new(x.shape, x.dtype))
    taken = {
        name: layouts.by_element(x, _table_dtype(rotary, x.dtype))
        for name, x in signature.options.items()
    }
    taken |= {name: layouts.by_any_element(given[name]) for name in _ROWS}
    strides = {
        f"{name}_stride": layouts.element_strides(x)
        for name, x in taken.items()
    }
    return recipe_of(
        signature,
        target,
        decide(p, target, family),
        given,
        taken,
        ("out",),
        {
            **strides,
            **rotary_fields(rotary),
            "batch": p.batch,
            "seqlen": p.seqlen_q,
            "num_heads": p.num_heads_q,
            "head_dim": p.head_dim,
            "inverse": rotary.inverse,
        },
    )


_ROWS = "x", "out"


def _table_dtype(rotary: Rotary, dtype: Any) -> np.dtype | None:
    """The dtype in which the kernel reads a table: positions are integers."""
    return np.dtype(rotary.positions) if dtype.kind in "iu" else None


def rotary_fields(rotary: Rotary) -> dict[str, int]:
    """The struct fields that say which columns are pairs."""
    num_pairs = rotary.rotary_dim // 2
    return {
        "num_positions": rotary.num_positions,
        "num_pairs": num_pairs,
        "pair_step": 2 if rotary.interleaved else 1,
        "pair_width": 1 if rotary.interleaved else num_pairs,
    }
