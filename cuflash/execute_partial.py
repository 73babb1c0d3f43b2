"""Runs the kernels that combine partial results: merging and adding rows.

`cuflash.distributed` calls them with arrays that it made itself, so nothing is
checked here.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from cuflash.abi import AddRowsArguments, MergeRowsArguments, Template
from cuflash.backends.base import Backend, Target
from cuflash.plans.partial import add_rows_plan, merge_rows_plan
from cuflash.problem import Problem

# Shape, strides in bytes and dtype of an array.
Described = tuple[tuple[int, ...], tuple[int, ...], Any]


def merge_rows(
    backend: Backend, a: Any, lse_a: Any, b: Any, lse_b: Any, result: Any
) -> None:
    """Merge b into a, into `result`; lse_a receives the merged lse.

    Parameters
    ----------
    backend : Backend
    a, b, result : array, (batch, seqlen, heads, head_dim)
        The heads of a token are contiguous. b has the inputs' dtype, the
        others have it or that of lse; `result` may be a.
    lse_a, lse_b : array, (batch, heads, seqlen)
        The last axis is contiguous.
    """
    arrays = a, b, lse_b, result, lse_a
    if not b.size:
        return
    found = _merge_recipe(_described(arrays), backend.target)
    _launch(found, backend, arrays[:3], arrays[3:])


def add_rows(backend: Backend, a: Any, b: Any, result: Any) -> None:
    """Store a + b, of the form that `merge_rows` takes, in `result`."""
    arrays = a, b, result
    if not b.size:
        return
    found = _add_recipe(_described(arrays), backend.target)
    _launch(found, backend, arrays[:2], arrays[2:])


def _described(arrays: tuple[Any, ...]) -> tuple[Described, ...]:
    return tuple((x.shape, x.strides, x.dtype) for x in arrays)


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
    seen: tuple[Described, ...], target: Target
) -> tuple[Any, Template]:
    a, b, lse_b, result, lse_a = seen
    batch, seqlen, heads, head_dim = b[0]
    decided = merge_rows_plan(_problem(b), a[2].name, result[2].name)
    template = Template(
        MergeRowsArguments,
        a_stride=_strides(a),
        b_stride=_strides(b),
        result_stride=_strides(result),
        lse_a_stride=_strides(lse_a),
        lse_b_stride=_strides(lse_b),
        batch=batch,
        seqlen=seqlen,
        num_heads=heads,
        head_dim=head_dim,
    )
    return target.load(decided), template


@functools.lru_cache(maxsize=4096)
def _add_recipe(
    seen: tuple[Described, ...], target: Target
) -> tuple[Any, Template]:
    a, b, result = seen
    batch, seqlen, heads, head_dim = b[0]
    decided = add_rows_plan(_problem(b), a[2].name, result[2].name)
    template = Template(
        AddRowsArguments,
        a_stride=_strides(a),
        b_stride=_strides(b),
        result_stride=_strides(result),
        batch=batch,
        seqlen=seqlen,
        columns=heads * head_dim,
    )
    return target.load(decided), template


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
