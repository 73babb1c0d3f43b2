"""Runs checked `forward` and `backward` calls by kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeAlias

from cuflash.backends.base import Backend, Target
from cuflash.launch.copies import converted
from cuflash.launch.kept import run_keeping
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
from cuflash.launch.run import Launched
from cuflash.launch.widened import in_float32, on_copies
from cuflash.plans.expression import found_of_mask
from cuflash.plans.plan import FamilyName
from cuflash.request import layouts, options, traced
from cuflash.request.problem import Call, Layout, Problem, Signature

_Run: TypeAlias = Callable[[Call, Backend], tuple[Any, ...]]


def _launched_by(
    found: Callable[[Signature, Target, FamilyName | None], Launched | None],
) -> Callable[[_Run], _Run]:
    """Let a function run those calls alone that are more than a launch."""

    def decorate(run: _Run) -> _Run:
        @functools.wraps(run)
        def runs(call: Call, backend: Backend) -> tuple[Any, ...]:
            target = backend.target
            launched = found(call.signature, target, target.family)
            if launched is None:
                return run(call, backend)
            given = launched.recipe.inputs(call.given)
            return tuple(launched.run(given, backend))

        return runs

    return decorate


def _launched(
    signature: Signature,
    recipe: Recipe,
    rows: Mapping[str, tuple[int, ...]],
    return_lse: bool = False,
) -> Launched | None:
    """A call with results of these shapes, None if it is more than a launch.

    A call is more if it has numbers of its own, options' arrays, other
    results or the user's, arrays to copy, or tiles to share (kept.py).
    """
    p, given = signature.problem, signature.layouts
    if (
        not recipe.repeats
        or recipe.options
        or recipe.copies
        or found_of_mask(recipe.decided)
        or not {*rows, "lse"}.issuperset(recipe.writes)
        or not given.keys().isdisjoint(rows)
    ):
        return None
    made = {name: (shape, given["q"].dtype) for name, shape in rows.items()}
    lse = (lse_shape_of(p), p.lse_dtype) if return_lse else None
    return Launched(recipe, made, lse)


@remembered
def launched_forward(
    signature: Signature, target: Target, family: FamilyName | None
) -> Launched | None:
    """A signature's forward call, None if it is more than a launch."""
    p = signature.problem
    if 0 in lse_shape_of(p) or in_float32(signature, target, family):
        return None
    recipe = _forward_recipe(signature, target, family, False)
    rows = {"out": out_shape_of(p)}
    return _launched(signature, recipe, rows, signature.return_lse)


@_launched_by(launched_forward)
@on_copies
def forward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a forward call: out in full rank, lse or None, max_score or not."""
    signature, target = call.signature, backend.target
    p, out, lse = signature.problem, call.out, None
    lse_shape = lse_shape_of(p)
    with backend.current():
        if out is None:
            dtype = signature.layouts["q"].dtype
            out = backend.rows(out_shape_of(p), dtype)
        if signature.return_lse:
            lse = backend.empty(lse_shape, p.lse_dtype)
        results = {"out": out, "lse": lse}
        if p.return_max_score:
            results["max_score"] = backend.empty(lse_shape, p.lse_dtype)
        if 0 not in lse_shape:
            keeps = call.kept is not None
            recipe = _forward_recipe(signature, target, target.family, keeps)
            run_keeping(recipe, call, backend, results)
    return tuple(results.values())


@remembered
def _forward_recipe(
    signature: Signature,
    target: Target,
    wanted: FamilyName | None,
    keeps: bool,
) -> Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    family = decided.record
    given = layouts_of(signature, {"out": out_shape_of(p)})
    taken = {x: family.readable(given[x]) for x in "qkv"}
    taken["out"] = layouts.writable(given["out"], family.loads_by_tma)
    writes = ("out", "lse", "max_score")[: 2 + p.return_max_score]
    return recipe_of(
        signature, target, decided, given, taken, writes, keeps=keeps
    )


@remembered
def launched_backward(
    signature: Signature, target: Target, family: FamilyName | None
) -> Launched | None:
    """A signature's backward call, None if it is more than a launch."""
    p = signature.problem
    if not have_pairs(p) or in_float32(signature, target, family):
        return None
    recipe = _backward_recipe(signature, target, family, False)
    return _launched(signature, recipe, gradient_shapes_of(p))


@_launched_by(launched_backward)
@on_copies
def backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a backward call: dq, dk, dv in full rank; dbias, dsink if wanted."""
    signature, target = call.signature, backend.target
    p = signature.problem
    with backend.current():
        results = new_gradients(call, backend)
        if have_pairs(p):
            keeps = call.kept is not None
            recipe = _backward_recipe(signature, target, target.family, keeps)
            run_keeping(recipe, call, backend, results)
        else:
            for gradient in call.gradients.values():
                zeros = backend.zeros(gradient.shape, gradient.dtype)
                backend.copy(gradient, zeros)
            if p.dlse and p.return_dsink and 0 not in lse_shape_of(p):
                reached = backward(_with_a_key(call, backend), backend)
                results["dsink"] = reached[-1]
        return returned(call, backend, results)


@remembered
def _backward_recipe(
    signature: Signature,
    target: Target,
    wanted: FamilyName | None,
    keeps: bool,
) -> Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    family, by_tma = decided.record, decided.record.loads_by_tma
    given = layouts_of(signature, gradient_shapes_of(p))
    taken = {x: family.readable(given[x]) for x in ("dout", "q", "k", "v")}
    taken["out"] = family.readable(given["out"], by_tma=False)
    # prepare/delta.cu zeroes dq in order, where a kernel adds to it.
    writable_dq = layouts.contiguous if family.adds_to_dq else layouts.writable
    taken["dq"] = writable_dq(given["dq"])
    for name in ("dk", "dv"):
        taken[name] = layouts.writable(given[name], by_tma)
    taken |= of_lse(given)
    return recipe_of(
        signature, target, decided, given, taken, gradients_of(p), keeps=keeps
    )


def of_lse(given: Layouts) -> dict[str, Layout]:
    """lse and dlse, as kernels read them."""
    names = ("lse", "dlse")
    return {x: layouts.contiguous(given[x]) for x in names if x in given}


# ---- Gradients: of backward, and the second ones of double_backward ----


def gradients_of(p: Problem) -> tuple[str, ...]:
    """The names of gradients: dq, dk and dv, and of options if wanted."""
    wanted = {"dbias": p.return_dbias, "dsink": p.return_dsink}
    return (
        *("dq", "dk", "dv"),
        *(name for name in wanted if wanted[name]),
        *dmods_of(p),
    )


def dmods_of(p: Problem) -> tuple[str, ...]:
    """The names of the gradients of `mod_arrays` that are wanted."""
    return tuple(f"dmods[{i}]" for i in p.return_dmod)


def have_pairs(p: Problem) -> bool:
    """Whether there is a query and a key: else gradients are 0."""
    dq, dk, _ = gradient_shapes_of(p).values()
    return 0 not in dq and 0 not in dk


def new_gradients(call: Call, backend: Backend) -> dict[str, Any]:
    """The user's gradients in full rank, or new ones, in order."""
    p, dtype = call.problem, call.signature.layouts["q"].dtype
    zero = not have_pairs(p)
    results: dict[str, Any] = {**call.gradients}
    for name, shape in gradient_shapes_of(p).items():
        given = results.pop(name, None)
        if given is None:
            given = backend.rows(shape, dtype, zero)
        results[name] = given
    if p.return_dbias:
        shape = call.options["bias"].shape
        # Kernels add to it, else.
        stored = options.stores_dbias(p) and have_pairs(p)
        of_bias = backend.empty if stored else backend.zeros
        results["dbias"] = of_bias(shape, p.lse_dtype)
    if p.return_dsink:
        new = backend.zeros if zero else backend.empty
        results["dsink"] = new((p.num_heads_q,), p.lse_dtype)
    return results | zeros_of_arrays(call, backend)


def zeros_of_arrays(call: Call, backend: Backend) -> dict[str, Any]:
    """Sums for the gradients of `mod_arrays`, by name."""
    p, given = call.problem, call.signature.options
    shapes = {i: given[traced.slot(i)].shape for i in p.return_dmod}
    return {
        f"dmods[{i}]": backend.zeros(shape, p.lse_dtype)
        for i, shape in shapes.items()
    }


def returned(
    call: Call, backend: Backend, results: dict[str, Any]
) -> tuple[Any, ...]:
    """The gradients in order, those of options in the options' dtypes."""
    p, given = call.problem, call.signature.options
    names = {f"dmods[{i}]": traced.slot(i) for i in p.return_dmod}
    if p.return_dbias:
        names["dbias"] = "bias"
    for name, option in names.items():
        dtype = given[option].dtype
        if dtype.name != p.lse_dtype:
            results[name] = converted(results[name], dtype, backend)
    return tuple(results.values())


# ---- Without keys ----


def _with_a_key(call: Call, backend: Backend) -> Call:
    """Add a dummy key, which contributes nothing, to a call without keys.

    Such a call computes dsink, which depends on sink, lse, delta and dlse
    alone: dlse reaches the sink of a query that sees no key.
    """
    signature = _signature_with_a_key(call.signature)
    new = {}
    for name in ("k", "v"):
        layout = signature.layouts[name]
        new[name] = backend.zeros(layout.shape, layout.dtype)
    read = {name: call.options[name] for name in signature.options}
    return Call(signature, {**call.given, **new}, None, read)


# What a call for dsink alone keeps of a problem; the rest has its default.
_OF_DSINK = (
    "block_q", "block_k", "deterministic", "precision", "sink",
    "num_sequences", "max_seqlen_q", "return_dsink", "dlse",
)  # fmt: skip


# Cached, because recipes are found by the signature's identity.
@remembered
def _signature_with_a_key(signature: Signature) -> Signature:
    """Of `_with_a_key`: options that dsink does not depend on are left out."""
    others = {
        x.name: x.default
        for x in fields(Problem)
        if x.default is not MISSING and x.name not in _OF_DSINK
    }
    p = replace(signature.problem, seqlen_k=1, **others)
    shapes, dtype = gradient_shapes_of(p), signature.layouts["q"].dtype
    given = {x: y for x, y in signature.layouts.items() if x not in shapes}
    for name in ("k", "v"):
        given[name] = layouts.new(shapes[f"d{name}"], dtype)
    kept = ("sink", "cu_seqlens_q", "cu_seqlens_k")
    read = {name: x for name, x in signature.options.items() if name in kept}
    return Signature(p, signature.rank, given, options=read)
