"""Runs checked calls of `weights`, `weight_sums`, `entropy` by kernels.

And of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.backends.base import Backend, Target
from cuflash.launch.attention import (
    dmods_of,
    have_pairs,
    returned,
    zeros_of_arrays,
)
from cuflash.launch.recipe import (
    Recipe,
    decide,
    layouts_of,
    recipe_of,
    remembered,
)
from cuflash.launch.results import gradient_shapes_of, lse_shape_of
from cuflash.launch.run import run
from cuflash.launch.widened import on_copies
from cuflash.plans.plan import FamilyName
from cuflash.request import layouts, options
from cuflash.request.problem import (
    Call,
    Layout,
    Problem,
    Signature,
    strip_lse,
)
from cuflash.request.readout import cotangent_of, weights_shape


@on_copies
def readout(call: Call, backend: Backend) -> Any:
    """Run a call of `problem.READOUTS`: its result in full rank."""
    signature, target = call.signature, backend.target
    p = signature.problem
    assert p.readout is not None
    shape, dtype = shape_of(p), p.readout.dtype
    with backend.current():
        if 0 in (*shape, p.seqlen_q, p.seqlen_k):
            return backend.zeros(shape, dtype)
        result = backend.empty(shape, dtype)
        recipe = _recipe(signature, target, target.family)
        run(recipe, call, backend, {"result": result})
    return result


def shape_of(p: Problem) -> tuple[int, ...]:
    """The shape of a readout, in full rank."""
    if p.direction == "entropy":
        return lse_shape_of(p)
    if p.direction == "weight_sums":
        return p.batch, p.num_heads_q, p.seqlen_k
    return weights_shape(p)


@remembered
def _recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    p = signature.problem
    decided = decide(p, target, wanted)
    given = layouts_of(signature)
    taken = {x: decided.record.readable(given[x]) for x in "qk"}
    taken["lse"] = layouts.contiguous(given["lse"])
    read = options.as_read(signature)
    return recipe_of(
        signature, target, decided, given, taken, ("result",),
        _numbers(p, read), direction="readout",
    )  # fmt: skip


def _numbers(p: Problem, read: Mapping[str, Layout]) -> dict[str, Any]:
    """The fields of a readout's struct that no other call has."""
    _, heads, queries, keys = weights_shape(p)
    strides: dict[str, Any] = {}
    for name in ("chosen", "queries", "keys", "heads"):
        if name in read:
            own = layouts.element_strides(read[name])
            strides[f"{name}_stride"] = own if len(own) > 1 else own[0]
    if "row_weights" in read:
        of_rows = layouts.element_strides(read["row_weights"])
        strides["row_weights_stride"] = (*of_rows, 0)
    return {
        "num_queries": queries,
        "num_keys": keys,
        "num_heads": heads,
        **strides,
    }


# ---- Gradients ----


@on_copies
def readout_backward(call: Call, backend: Backend) -> tuple[Any, ...]:
    """Run a call of `problem.READOUT_GRADIENTS`: dq, dk, dlse in full rank.

    Then drow_weights, with the shape that the user passed, and the gradients
    of `mod_arrays`, as wanted.
    """
    signature, target = call.signature, backend.target
    p, dtype = signature.problem, signature.layouts["q"].dtype
    assert p.readout is not None
    new = backend.empty if have_pairs(p) else backend.zeros
    with backend.current():
        results = {
            name: new(shape, dtype) for name, shape in _shapes_of(p).items()
        }
        results["dlse"] = new(lse_shape_of(p), p.lse_dtype)
        if p.readout.return_drow_weights:
            results["drow_weights"] = new(lse_shape_of(p), p.lse_dtype)
        results |= zeros_of_arrays(call, backend)
        if have_pairs(p):
            recipe = _gradient_recipe(signature, target, target.family)
            run(recipe, call, backend, results)
        if p.readout.return_drow_weights:
            results["drow_weights"] = _summed(results["drow_weights"], call)
        return returned(call, backend, results)


def _shapes_of(p: Problem) -> dict[str, tuple[int, ...]]:
    shapes = gradient_shapes_of(p)
    return {name: shapes[name] for name in ("dq", "dk")}


def _summed(of_rows: Any, call: Call) -> Any:
    """Gradients of all rows, as row weights of the user's shape have them."""
    full = strip_lse(of_rows, call.rank)
    shape = tuple(call.options["row_weights"].shape)
    if shape == tuple(full.shape):  # always so for JAX, which only records
        return full
    extra = tuple(range(full.ndim - len(shape)))
    shared = [
        i + len(extra)
        for i, size in enumerate(shape)
        if size != full.shape[i + len(extra)]
    ]
    if extra or shared:
        full = full.sum(axis=(*extra, *shared))
    return full.reshape(shape)


@remembered
def _gradient_recipe(
    signature: Signature, target: Target, wanted: FamilyName | None
) -> Recipe:
    p = signature.problem
    assert p.readout is not None
    decided = decide(p, target, wanted)
    cotangent = cotangent_of(p.direction)
    given = layouts_of(signature, _shapes_of(p))
    taken = {x: decided.record.readable(given[x]) for x in "qk"}
    for name in ("lse", cotangent):
        taken[name] = layouts.contiguous(given[name])
    for name in ("dq", "dk"):
        taken[name] = layouts.writable(given[name])
    writes = ["dq", "dk", "dlse"]
    if p.readout.return_drow_weights:
        writes.append("drow_weights")
    writes += dmods_of(p)
    return recipe_of(
        signature, target, decided, given, taken, writes,
        _numbers(p, options.as_read(signature)), direction="readout",
        sources={"cotangent": cotangent},
    )  # fmt: skip
