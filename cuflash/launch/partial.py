"""Runs the kernels that combine partial results: merging and adding rows.

`cuflash.distributed` calls them with arrays that it made itself, so nothing is
checked here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

from cuflash.backends.base import Backend, Target
from cuflash.launch.structs import (
    AddRowsArguments,
    MergeRowsArguments,
    Template,
)
from cuflash.plans.partial import add_rows_plan, merge_rows_plan
from cuflash.request.problem import Problem

# Shape, strides in bytes and dtype of an array.
Described = tuple[tuple[int, ...], tuple[int, ...], Any]


# The kernels take one array and up to this many more (partial/rows.cuh).
MOST_OTHERS = 3


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
    if not a.size:
        return
    rows, lses = [x for x, _ in others], [lse for _, lse in others]
    seen = _described(a), _described(result), _described(lse_a)
    of_rows, of_lses = (tuple(map(_described, x)) for x in (rows, lses))
    found = _merge_recipe(*seen, of_rows, of_lses, backend.target)
    read = (a, *_padded(rows), *_padded(lses))
    _launch(found, backend, read, (result, lse_a))


def add_rows(
    backend: Backend, a: Any, others: Sequence[Any], result: Any
) -> None:
    """Store the sum of a and others, as `merge_rows` takes, in `result`."""
    if not a.size:
        return
    seen = _described(a), _described(result), tuple(map(_described, others))
    found = _add_recipe(*seen, backend.target)
    _launch(found, backend, (a, *_padded(others)), (result,))


def _padded(given: Sequence[Any]) -> list[Any]:
    """As many as the argument structs have; the last one fills the rest."""
    return [*given, *[given[-1]] * (MOST_OTHERS - len(given))]


def _described(array: Any) -> Described:
    return array.shape, array.strides, array.dtype


def _launch(
    recipe: tuple[Any, Template],
    backend: Backend,
    read: tuple[Any, ...],
    written: tuple[Any, ...],
) -> None:
    loaded, template = recipe
    with backend.current():
        addresses = (
            *backend.address(read),
            *backend.address(written, written=True),
        )
        arguments = template.fill((), addresses)
        backend.launch(loaded, arguments, template.kind)


@functools.lru_cache(maxsize=4096)
def _merge_recipe(
    a: Described,
    result: Described,
    lse_a: Described,
    others: tuple[Described, ...],
    lses: tuple[Described, ...],
    target: Target,
) -> tuple[Any, Template]:
    batch, seqlen, heads, head_dim = a[0]
    decided = merge_rows_plan(
        _problem(others[0]), a[2].name, result[2].name, len(others)
    )
    template = Template(
        MergeRowsArguments,
        **_strides_of_rows(a, others, result),
        lse_a_stride=_strides(lse_a),
        **{
            f"lse_b{i}_stride": _strides(x)
            for i, x in enumerate(_padded(lses))
        },
        batch=batch,
        seqlen=seqlen,
        num_heads=heads,
        head_dim=head_dim,
    )
    return target.load(decided), template


@functools.lru_cache(maxsize=4096)
def _add_recipe(
    a: Described,
    result: Described,
    others: tuple[Described, ...],
    target: Target,
) -> tuple[Any, Template]:
    batch, seqlen, heads, head_dim = a[0]
    decided = add_rows_plan(
        _problem(others[0]), a[2].name, result[2].name, len(others)
    )
    template = Template(
        AddRowsArguments,
        **_strides_of_rows(a, others, result),
        batch=batch,
        seqlen=seqlen,
        columns=heads * head_dim,
    )
    return target.load(decided), template


def _strides_of_rows(
    a: Described, others: tuple[Described, ...], result: Described
) -> dict[str, tuple[int, int]]:
    """The fields of both argument structs."""
    arrays = {"a": a, "result": result}
    arrays |= {f"b{i}": x for i, x in enumerate(_padded(others))}
    return {f"{name}_stride": _strides(x) for name, x in arrays.items()}


def _strides(of: Described) -> tuple[int, int]:
    """From batch to batch, and along the next axis, in elements."""
    _, strides, dtype = of
    return strides[0] // dtype.itemsize, strides[1] // dtype.itemsize


def _problem(of: Described) -> Problem:
    (batch, seqlen, heads, head_dim), _, dtype = of
    name: Literal["float16", "bfloat16", "float32", "float64"] = dtype.name
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
