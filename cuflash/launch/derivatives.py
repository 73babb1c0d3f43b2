"""Runs checked calls of `jvp` and `double_backward` by kernels.

As `execute` runs the others; but a recipe's pointers go by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.backends.base import Backend, Target
from cuflash.launch import attention as execute
from cuflash.launch.attention import (
    common_fields,
    converted,
    copied,
    copied_option,
    decide,
    gradient_shapes_of,
    lse_shape_of,
    out_shape_of,
    remembered,
)
from cuflash.launch.structs import (
    DoubleBackwardArguments,
    DoubleBackwardOptionsArguments,
    DoubleBackwardWgmmaArguments,
    JvpArguments,
    JvpOptionsArguments,
    JvpWgmmaArguments,
    Template,
    pointers_of,
)
from cuflash.plans import workspace
from cuflash.plans.plan import FamilyName, Plan
from cuflash.plans.steps import num_directions
from cuflash.request import layouts, options
from cuflash.request.problem import Call, Layout, Problem, Signature


@dataclass(frozen=True, eq=False)
class _Recipe:
    """All decisions about the calls of one signature.

    Attributes
    ----------
    decided, loaded, template
        As in `execute.Recipe`.
    copies : mapping of str to Layout
        The arrays that kernels cannot access in place, and the layouts of
        their copies, by the names of pointers.
    pointers : tuple of str
        The struct's pointers, in its order; ``seed`` among them.
    workspace : tuple of int
        Bytes of the buffers `workspace.NAMES`.
    boxes : tuple of (str, Boxes)
        The struct's TensorMaps: a pointer's name, and what is there.
    """

    decided: Plan
    loaded: Any
    template: Template
    copies: Mapping[str, Layout]
    pointers: tuple[str, ...]
    workspace: tuple[int, ...]
    boxes: tuple[tuple[str, layouts.Boxes], ...] = ()


def jvp(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a jvp call: out, lse, out_dot and lse_dot in full rank.

    The last two have an axis of directions before those of out and lse.
    """
    signature = call.signature
    p, dtype = signature.problem, signature.layouts["q"].dtype
    assert p.tangents is not None
    count, lse_shape = p.tangents.count, lse_shape_of(p)
    out = lse = lse_dot = None
    after_forward = _is_after_forward(p, backend)
    if after_forward:
        out, lse = execute.forward(_call_of_forward(call), backend)
    with backend.current():
        out_dot = backend.empty((count, *out_shape_of(p)), dtype)
        if signature.return_lse:
            lse_dot = backend.empty((count, *lse_shape), p.lse_dtype)
        moved = {"out_dot": out_dot, "lse_dot": lse_dot}
        if not after_forward:
            out = backend.empty(out_shape_of(p), dtype)
            if signature.return_lse:
                lse = backend.empty(lse_shape, p.lse_dtype)
            written = {"out": out, "lse": lse, **(moved if count else {})}
            _run_jvp(call, backend, written)
        elif count:
            given = {**call.given, "out": out, "lse": lse}
            reading = _signature_after_forward(signature)
            _run_jvp(
                replace(call, signature=reading, given=given), backend, moved
            )
    return out, lse if signature.return_lse else None, out_dot, lse_dot


def _is_after_forward(p: Problem, backend: Backend) -> bool:
    """Whether the kernels of a JVP read out and lse; none without rows."""
    if 0 in lse_shape_of(p):
        return False
    return decide(p, backend.target, backend.target.family).after_forward


def _call_of_forward(call: Call) -> Call:
    """The forward call of a JVP's inputs, which returns lse."""
    return Call(
        _signature_of_forward(call.signature),
        call.given,
        options=call.options,
        seed=call.seed,
    )


def _run_jvp(call: Call, backend: Backend, written: dict[str, Any]) -> None:
    """Launch the kernels of a JVP, if there are any rows."""
    signature, target = call.signature, backend.target
    if 0 not in lse_shape_of(signature.problem):
        recipe = _jvp_recipe(signature, target, target.family)
        _launch(recipe, call, backend, {}, written)


def double_backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a double_backward call: d2q, d2k, d2v and ddout in full rank.

    Then d2bias, d2sink and ddlse if wanted.
    """
    signature = call.signature
    p, dtype = signature.problem, signature.layouts["q"].dtype
    shapes, names = gradient_shapes_of(p), ("dq", "dk", "dv")
    has_pairs = 0 not in shapes[0] and 0 not in shapes[1]
    with backend.current():
        ddout = backend.empty((1, *out_shape_of(p)), dtype)
        ddlse = backend.empty((1, *lse_shape_of(p)), p.lse_dtype)
        moved = {"out_dot": ddout, "lse_dot": ddlse}
        _run_jvp(_call_of_jvp(call, backend), backend, moved)
        new = backend.empty if has_pairs else backend.zeros
        written = {
            x: new(y, dtype) for x, y in zip(names, shapes, strict=True)
        }
        if p.return_dbias:  # zeros: kernels add to it
            shape = call.options["bias"].shape
            written["dbias"] = backend.zeros(shape, p.lse_dtype)
        if p.return_dsink:
            written["dsink"] = new((p.num_heads_q,), p.lse_dtype)
        if has_pairs:
            target = backend.target
            recipe = _double_recipe(signature, target, target.family)
            _launch(recipe, call, backend, moved, written)
        if p.return_dbias and p.bias != p.lse_dtype:
            of_bias = signature.options["bias"].dtype
            written["dbias"] = converted(written["dbias"], of_bias, backend)
    results = [written.pop(name) for name in names]
    others = [*written.values()]
    if p.return_ddlse:
        others.append(ddlse[0])
    return (*results, ddout[0], *others)


def _call_of_jvp(call: Call, backend: Backend) -> Call:
    """The call whose tangents are ddout and ddlse."""
    names: tuple[str, ...] = ("q", "k", "v")
    signature = _signature_of_jvp(call.signature, names)
    if _is_after_forward(signature.problem, backend):
        names = (*names, "out", "lse")
        signature = _signature_of_jvp(call.signature, names)
    return Call(
        signature,
        {name: call.given[name] for name in names},
        options=call.options,
        seed=call.seed,
        tangents=call.tangents,
    )


# Cached, because recipes are found by the signature's identity.
@remembered
def _signature_of_forward(signature: Signature) -> Signature:
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
        return_dbias=False,
        return_dsink=False,
        return_ddlse=False,
        dlse=False,
    )
    given = {name: signature.layouts[name] for name in names}
    return replace(signature, problem=problem, layouts=given, return_lse=True)


# ---- Recipes ----


@remembered
def _jvp_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> _Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    given = signature.layouts
    family = decided.record
    taken = {x: family.readable(given[x]) for x in "qkv"}
    rows = {}
    if decided.after_forward:  # out is read element by element
        taken["out"] = layouts.writable(given["out"])
        rows["lse"] = layouts.contiguous(given["lse"])
    results = {"out": layouts.new(out_shape_of(p), given["q"].dtype)}
    constants = {
        **layouts.row_strides({**results, **taken}),
        **common_fields(p, decided),
    }
    kind = JvpOptionsArguments if p.options else JvpArguments
    if family.loads_by_tma:
        kind = JvpWgmmaArguments
    return _recipe(
        signature,
        target,
        decided,
        kind,
        constants,
        layouts.changes(given, taken | rows),
        {x: taken[x] for x in "qkv"} if family.loads_by_tma else {},
    )


@remembered
def _double_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> _Recipe:
    p, given = signature.problem, signature.layouts
    decided = decide(p, target, wanted)
    family = decided.record
    taken = {
        x: family.readable(given[x]) for x in ("dout", "q", "k", "v", "out")
    }
    results = {
        name: layouts.new(shape, given["q"].dtype)
        for name, shape in zip(
            ("dq", "dk", "dv"), gradient_shapes_of(p), strict=True
        )
    }
    constants = {
        **layouts.row_strides({**taken, **results}),
        **common_fields(p, decided),
    }
    rows = {
        x: layouts.contiguous(given[x]) for x in ("lse", "dlse") if x in given
    }
    kind = DoubleBackwardArguments
    if p.options:
        kind = DoubleBackwardOptionsArguments
    by_tma: dict[str, Layout] = {}
    if family.loads_by_tma:
        kind = DoubleBackwardWgmmaArguments
        by_tma = {x: taken[x] for x in ("q", "k", "v", "dout")}
    return _recipe(
        signature,
        target,
        decided,
        kind,
        constants,
        layouts.changes(given, taken | rows),
        by_tma,
    )


def _tangents_taken(
    signature: Signature, decided: Plan
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """The layouts of the tangents that kernels read, and of copies.

    By what moves, and by the names of pointers. Without directions, nothing
    moves.
    """
    assert signature.problem.tangents is not None
    if signature.problem.tangents.count == 0:
        return {}, {}
    taken, copies = {}, {}
    for name, given in signature.tangents.items():
        if name in "qkv":
            taken[name] = decided.record.readable(given)
            if decided.record.loads_by_tma:  # a direction counts as a batch
                taken[name] = layouts.foldable(taken[name])
        else:
            taken[name] = layouts.by_element(given)
        if taken[name] is not given:
            copies[f"{name}_dot"] = taken[name]
    return taken, copies


def _tangent_numbers(
    signature: Signature, taken: Mapping[str, Layout]
) -> dict[str, Any]:
    """The fields of `TangentNumbers`: directions, and where tangents stand.

    Tangents of out are contiguous, so that a direction may count as a batch,
    also where there is one batch.
    """
    count, shape = (
        num_directions(signature.problem),
        out_shape_of(signature.problem),
    )
    out_dot = layouts.new((count, *shape), signature.layouts["q"].dtype)
    strides = layouts.row_strides({"out_dot": out_dot})
    direction, batch, *others = strides["out_dot_stride"]
    numbers: dict[str, Any] = {
        "num_directions": count,
        "out_dot": (direction, batch or direction, *others),
    }
    for name, layout in taken.items():
        if name in "qkv":
            strides = layouts.row_strides({name: layout})
            numbers[f"{name}_dot"] = strides[f"{name}_stride"]
        else:
            first, *inner = layouts.element_strides(layout)
            numbers[f"{name}_dot_direction"] = first
            numbers[f"{name}_dot"] = tuple(inner) if inner[1:] else inner[0]
    return numbers


def _recipe(
    signature: Signature,
    target: Target,
    decided: Plan,
    kind: Any,
    constants: dict[str, Any],
    copies: dict[str, Layout],
    by_tma: Mapping[str, Layout] | None = None,
) -> _Recipe:
    """Build a recipe; add the fields and copies of tangents and options.

    `by_tma` are the inputs whose tiles TMA loads, as it does those of
    tangents.
    """
    moves, copies_of_tangents = _tangents_taken(signature, decided)
    constants["tangents"] = _tangent_numbers(signature, moves)
    copies |= copies_of_tangents
    if signature.problem.options:
        read = options.as_read(signature)
        constants["options"] = options.numbers(signature, read)
        copies |= layouts.changes(signature.options, read)
    return _Recipe(
        decided,
        target.load(decided),
        Template(kind, **constants),
        copies,
        pointers_of(kind),
        workspace.sizes(decided.workspace, workspace.NAMES),
        _boxes(decided, by_tma, moves) if by_tma else (),
    )


def _boxes(
    decided: Plan, given: Mapping[str, Layout], moves: Mapping[str, Layout]
) -> tuple[tuple[str, layouts.Boxes], ...]:
    """The boxes of the inputs, then of q's, k's and v's tangents, by pointer.

    A missing tangent gets its input's map; no kernel reads it.
    """
    tile = decided.tile
    assert tile is not None  # only a merge plan has no tile
    rows = {"q": tile.block_q, "k": tile.block_k, "v": tile.block_k}
    of_inputs = {**rows, "dout": tile.block_q}
    found = [
        (x, layouts.Boxes.of(layout, of_inputs[x]))
        for x, layout in given.items()
    ]
    for name, n in rows.items():
        if name in moves:
            whole = layouts.folded(moves[name])
            found.append((f"{name}_dot", layouts.Boxes.of(whole, n)))
        else:
            found.append((name, layouts.Boxes.of(given[name], n)))
    return tuple(found)


# ---- Launches ----


def _launch(
    recipe: _Recipe,
    call: Call,
    backend: Backend,
    moved: Mapping[str, Any],
    written: Mapping[str, Any],
) -> None:
    """Launch a recipe's kernels.

    They read the call's inputs and `moved`, and write `written`, by pointer.
    """
    read = {**_inputs(recipe, call, backend), **moved}
    # Kept alive until the kernels are queued, as are the copies in `read`.
    _kept, buffers = backend.workspace(recipe.workspace)
    addresses = dict(zip(workspace.NAMES, buffers, strict=True))
    addresses["seed"] = call.seed
    for arrays, are_results in ((read, False), (written, True)):
        found = backend.address([*arrays.values()], written=are_results)
        addresses |= zip(arrays, found, strict=True)
    pointers = [addresses.get(name, 0) for name in recipe.pointers]
    maps = [backend.tensor_map(addresses[x], box) for x, box in recipe.boxes]
    arguments = recipe.template.fill(maps, pointers)
    backend.launch(recipe.loaded, arguments, recipe.template.kind)


def _inputs(recipe: _Recipe, call: Call, backend: Backend) -> dict[str, Any]:
    """The arrays that kernels read, or their copies, by pointer."""
    read: dict[str, Any] = {}
    for name, array in call.given.items():
        layout = recipe.copies.get(name)
        if layout is not None:
            array = copied(layout, call.arrays[name], backend)
        read[name] = array
    for name, array in call.options.items():
        layout = recipe.copies.get(name)
        if layout is not None:
            array = copied_option(layout, array, backend)
        read[name] = array
    for name, array in call.tangents.items():
        layout = recipe.copies.get(f"{name}_dot")
        if layout is not None:
            array = _copied_tangent(layout, name, call, backend)
        read[f"{name}_dot"] = array
    return read


def _copied_tangent(
    layout: Layout, name: str, call: Call, backend: Backend
) -> Any:
    """A copy of a tangent, with a layout of `_tangents_taken`."""
    view = call.directions[name]
    if name in "qkv":
        return copied(layout, view, backend)
    missing = (1,) * (len(layout.shape) - view.ndim)
    view = view.reshape(view.shape[:1] + missing + view.shape[1:])
    return copied_option(layout, view, backend)
