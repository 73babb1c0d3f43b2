"""Runs checked calls of `jvp` and `double_backward` by kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.backends.base import Backend, Target
from cuflash.launch import attention
from cuflash.launch.attention import (
    gradients_of,
    have_pairs,
    new_gradients,
    of_lse,
    returned,
)
from cuflash.launch.recipe import (
    Layouts,
    Recipe,
    decide,
    layouts_of,
    recipe_of,
    remembered,
)
from cuflash.launch.results import (
    gradient_shapes_of,
    lse_shape_of,
    out_shape_of,
)
from cuflash.launch.run import run
from cuflash.launch.widened import on_copies
from cuflash.plans.expression import has_expression
from cuflash.plans.plan import FamilyName, Plan, with_capped_score
from cuflash.plans.record import Family
from cuflash.plans.steps import num_directions
from cuflash.request import layouts, mod_tangents, options, traced
from cuflash.request.problem import Call, Layout, Signature

_NO_GRADIENTS: dict[str, Any] = {
    x.name: x.default for x in options.TABLE if x.of_gradients
}


@on_copies
def jvp(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a jvp call: out, lse, out_dot and lse_dot in full rank.

    The last two have an axis of directions before those of out and lse.
    """
    signature = call.signature
    p, dtype = signature.problem, signature.layouts["q"].dtype
    assert p.tangents is not None
    count, lse_shape = p.tangents.count, lse_shape_of(p)
    out = lse = lse_dot = None
    after_forward = _is_after_forward(signature, backend)
    if after_forward:
        of_inputs = _signature_of_forward(signature)
        out, lse = attention.forward(
            replace(call, signature=of_inputs, tangents={}), backend
        )
    with backend.current():
        out_dot = backend.empty((count, *out_shape_of(p)), dtype)
        if signature.return_lse:
            lse_dot = backend.empty((count, *lse_shape), p.lse_dtype)
        moved = {"out_dot": out_dot, "lse_dot": lse_dot}
        if not after_forward:
            out = backend.empty(out_shape_of(p), dtype)
            if signature.return_lse:
                lse = backend.empty(lse_shape, p.lse_dtype)
            if not count:  # null: not stored
                moved = dict.fromkeys(moved)
            _run_jvp(call, backend, {"out": out, "lse": lse, **moved})
        elif count:
            given = {**call.given, "out": out, "lse": lse}
            reading = _signature_after_forward(signature)
            _run_jvp(
                replace(call, signature=reading, given=given), backend, moved
            )
    return out, lse if signature.return_lse else None, out_dot, lse_dot


def _run_jvp(call: Call, backend: Backend, results: dict[str, Any]) -> None:
    """Launch the kernels of a JVP, if there are any rows."""
    signature, target = call.signature, backend.target
    if 0 not in lse_shape_of(signature.problem):
        recipe = _jvp_recipe(signature, target, target.family)
        run(recipe, call, backend, results)


@on_copies
def double_backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a double_backward call: d2q, d2k, d2v and ddout in full rank.

    Then those of options, and ddlse, if wanted.
    """
    signature = call.signature
    p, dtype = signature.problem, signature.layouts["q"].dtype
    with backend.current():
        ddout = backend.empty((1, *out_shape_of(p)), dtype)
        ddlse = backend.empty((1, *lse_shape_of(p)), p.lse_dtype)
        moved = {"out_dot": ddout, "lse_dot": ddlse}
        not_stored = {"out": None, "lse": None}
        of_jvp = _call_of_jvp(call, backend)
        _run_jvp(of_jvp, backend, {**not_stored, **moved})
        results = new_gradients(call, backend)
        if have_pairs(p):
            target, reading = backend.target, _signature_after_jvp(signature)
            recipe = _double_recipe(reading, target, target.family)
            given = {**call.given, **moved}
            run(recipe, replace(call, given=given), backend, results)
        found = returned(call, backend, results)
    others = (*found[3:], ddlse[0]) if p.return_ddlse else found[3:]
    return (*found[:3], ddout[0], *others)


# ---- The calls that they make ----

# Cached, because recipes are found by the signature's identity.


@remembered
def _signature_of_forward(signature: Signature) -> Signature:
    """Of the forward call of a JVP's inputs, which returns lse."""
    problem = replace(
        signature.problem,
        direction="forward",
        block_q=None,
        block_k=None,
        tangents=None,
    )
    return replace(
        signature, problem=problem, tangents={}, several=False, return_lse=True
    )


@remembered
def _signature_after_forward(signature: Signature) -> Signature:
    """With the results of the forward call among the inputs."""
    p = signature.problem
    dtype = signature.layouts["q"].dtype
    results = {
        "out": layouts.new(out_shape_of(p), dtype),
        "lse": layouts.new(lse_shape_of(p), np.dtype(p.lse_dtype)),
    }
    return replace(signature, layouts={**signature.layouts, **results})


@remembered
def _signature_after_jvp(signature: Signature) -> Signature:
    """With the results of a double backward's JVP among the inputs."""
    after = _signature_after_forward(signature).layouts
    results = {
        f"{name}_dot": layouts.new((1, *x.shape), x.dtype)
        for name, x in after.items()
        if name in ("out", "lse")
    }
    return replace(signature, layouts={**signature.layouts, **results})


def _call_of_jvp(call: Call, backend: Backend) -> Call:
    """The call whose tangents are ddout and ddlse."""
    names: tuple[str, ...] = ("q", "k", "v")
    signature = _signature_of_jvp(call.signature, names)
    if _is_after_forward(signature, backend):
        names = (*names, "out", "lse")
        signature = _signature_of_jvp(call.signature, names)
    given = {name: call.given[name] for name in names}
    return replace(call, signature=signature, given=given)


@remembered
def _signature_of_jvp(
    signature: Signature, names: tuple[str, ...]
) -> Signature:
    """Of `_call_of_jvp`: a JVP that reads the arrays of these names."""
    problem = replace(
        signature.problem,
        direction="jvp",
        block_q=None,
        block_k=None,
        deterministic=False,
        return_ddlse=False,
        dlse=False,
        **_NO_GRADIENTS,
    )
    given = {name: signature.layouts[name] for name in names}
    return replace(signature, problem=problem, layouts=given, return_lse=True)


def _is_after_forward(signature: Signature, backend: Backend) -> bool:
    """Whether the kernels of a JVP read out and lse; none without rows."""
    if 0 in lse_shape_of(signature.problem):
        return False
    target = backend.target
    return _reads_forward(signature, target, target.family)


@remembered
def _reads_forward(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> bool:
    p = _capped(signature, target, wanted).problem
    return decide(p, target, wanted).after_forward


# ---- Recipes ----


def _capped(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Signature:
    """As kernels take it: `with_capped_score`."""
    p = with_capped_score(signature.problem, target.device(), wanted)
    return signature if p is signature.problem else replace(
        signature, problem=p
    )  # fmt: skip


@remembered
def _jvp_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    signature = _capped(signature, target, wanted)
    p = signature.problem
    decided = decide(p, target, wanted)
    family = decided.record
    given = layouts_of(signature, {"out": out_shape_of(p)})
    taken = {x: family.readable(given[x]) for x in "qkv"}
    taken["out"] = layouts.writable(given["out"])  # accessed by element
    writes: tuple[str, ...] = ("out_dot", "lse_dot")
    if decided.after_forward:
        taken["lse"] = layouts.contiguous(given["lse"])
    else:
        writes = ("out", "lse", *writes)
    return _recipe(signature, target, decided, given, taken, writes)


@remembered
def _double_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    signature = _capped(signature, target, wanted)
    p = signature.problem
    decided = decide(p, target, wanted)
    family = decided.record
    given = layouts_of(signature, gradient_shapes_of(p))
    taken = {name: given[name] for name in gradient_shapes_of(p)}
    for name in ("dout", "q", "k", "v", "out"):
        taken[name] = family.readable(given[name])
    taken |= of_lse(given)
    return _recipe(signature, target, decided, given, taken, gradients_of(p))


def _recipe(
    signature: Signature, target: Target, decided: Plan, given: Layouts,
    taken: Layouts, writes: tuple[str, ...],
) -> Recipe:  # fmt: skip
    """As `recipe_of`, with tangents."""
    moves = _tangents_taken(signature, decided.record)
    numbers = {"tangents": _tangent_numbers(signature, moves)}
    if has_expression(signature.problem):
        numbers["mod_tangents"] = mod_tangents.tangent_numbers(moves)
    taken = {**taken, **moves}
    return recipe_of(signature, target, decided, given, taken, writes, numbers)


def _tangents_taken(signature: Signature, family: Family) -> dict[str, Layout]:
    """The layouts of the tangents that kernels read, by pointer.

    Without directions, nothing moves.
    """
    assert signature.problem.tangents is not None
    if signature.problem.tangents.count == 0:
        return {}
    taken = {}
    for name, given in signature.tangents.items():
        if name not in "qkv":
            layout = layouts.by_element(given)
        elif family.loads_by_tma:  # a direction counts as a batch
            layout = layouts.foldable(family.readable(given))
        else:
            layout = family.readable(given)
        taken[f"{name}_dot"] = layout
    return taken


def _tangent_numbers(
    signature: Signature, taken: Mapping[str, Layout]
) -> dict[str, Any]:
    """The fields of `TangentNumbers`: directions, and where tangents stand.

    Tangents of out are contiguous, so that a direction may count as a batch,
    also where there is one batch.
    """
    p = signature.problem
    count = num_directions(p)
    dtype = signature.layouts["q"].dtype
    out_dot = layouts.new((count, *out_shape_of(p)), dtype)
    direction, batch, *others = _row_strides(out_dot)
    numbers: dict[str, Any] = {
        "num_directions": count,
        "out_dot": (direction, batch or direction, *others),
    }
    for name, layout in taken.items():
        if traced.is_slot(name):
            continue
        if name in ("q_dot", "k_dot", "v_dot"):
            numbers[name] = _row_strides(layout)
        else:
            first, *inner = layouts.element_strides(layout)
            numbers[f"{name}_direction"] = first
            numbers[name] = tuple(inner) if inner[1:] else inner[0]
    return numbers


def _row_strides(layout: Layout) -> tuple[int, ...]:
    (strides,) = layouts.row_strides({"": layout}).values()
    return strides
