"""Runs the kernels that combine partial results: merging and adding rows.

`cuflash.distributed` calls them with arrays that it made itself, so nothing is
checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from cuflash.backends.base import Backend, Target
from cuflash.launch.directions import MOST_OTHERS
from cuflash.launch.recipe import Recipe, recipe_of, remembered
from cuflash.launch.run import run
from cuflash.plans.partial import add_rows_plan, merge_rows_plan
from cuflash.request import layouts
from cuflash.request.problem import Call, Layout, Problem, Signature

# Shape, strides in bytes and dtype of an array, after its name.
Described = tuple[str, tuple[int, ...], tuple[int, ...], Any]


def merge_rows(
    backend: Backend,
    a: Any,
    lse_a: Any,
    others: Sequence[tuple[Any, Any]],
    result: Any,
) -> None:
    """Merge others into a, into `result`; lse_a receives the merged lse.

    Parameters
    ----------
    backend : Backend
    a, result : array, (batch, seqlen, heads, head_dim)
        The heads of a token are contiguous. Of the inputs' dtype or of that
        of lse; `result` may be a.
    lse_a : array, (batch, heads, seqlen)
        The last axis is contiguous.
    others : sequence of (array, lse)
        One to `MOST_OTHERS`, like a and lse_a, of the inputs' dtype.
    """
    given = {"a": a}
    given |= {f"b{i}": x for i, (x, _) in enumerate(others)}
    given |= {f"lse_b{i}": lse for i, (_, lse) in enumerate(others)}
    _run(backend, given, {"result": result, "lse_a": lse_a})


def add_rows(
    backend: Backend, a: Any, others: Sequence[Any], result: Any
) -> None:
    """Store the sum of a and others, as `merge_rows` takes, in `result`."""
    given = {"a": a, **{f"b{i}": x for i, x in enumerate(others)}}
    _run(backend, given, {"result": result})


def _run(
    backend: Backend, given: dict[str, Any], results: dict[str, Any]
) -> None:
    if not given["a"].size:
        return
    described = tuple([
        (name, x.shape, x.strides, x.dtype)
        for name, x in (*given.items(), *results.items())
    ])  # fmt: skip
    signature = _signature(described)
    recipe = _recipe(signature, backend.target)
    with backend.current():
        run(recipe, Call(signature, given), backend, results)


# Cached, because recipes are found by the signature's identity.
@remembered
def _signature(described: tuple[Described, ...]) -> Signature:
    given = {name: Layout(*others) for name, *others in described}
    return Signature(_problem(given["b0"]), 4, given)


@remembered
def _recipe(signature: Signature, target: Target) -> Recipe:
    given = signature.layouts
    a, result = given["a"], given["result"]
    batch, seqlen, heads, head_dim = a.shape
    if "lse_a" in given:
        direction, planned = "merge_rows", merge_rows_plan
        sizes = {"num_heads": heads, "head_dim": head_dim}
    else:
        direction, planned = "add_rows", add_rows_plan
        sizes = {"columns": heads * head_dim}
    count = sum(name in given for name in _OTHERS)
    strides = {
        f"{name}_stride": layouts.element_strides(x)[:2]
        for name, x in given.items()
    }
    return recipe_of(
        signature,
        target,
        planned(signature.problem, a.dtype.name, result.dtype.name, count),
        given,
        {},
        [x for x in ("result", "lse_a") if x in given],
        {**strides, **sizes, "batch": batch, "seqlen": seqlen},
        direction=direction,
    )


_OTHERS = [f"b{i}" for i in range(MOST_OTHERS)]


def _problem(of: Layout) -> Problem:
    batch, seqlen, heads, head_dim = of.shape
    name: Literal["float16", "bfloat16", "float32", "float64"] = of.dtype.name
    return Problem(
        direction="merge",
        dtype=name,
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=0,
        num_heads_q=heads,
        num_heads_kv=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        scale=1.0,
    )
