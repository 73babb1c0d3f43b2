"""Arrays that kernels can access: new ones, and copies."""

from __future__ import annotations

from typing import Any

from cuflash.backends.base import Backend
from cuflash.request import layouts
from cuflash.request.problem import Call, Layout


def new_array(layout: Layout, backend: Backend) -> Any:
    """A new array with a layout that `layouts.new` returned."""
    rows = backend.rows(layouts.allocated(layout), layout.dtype)
    return rows[..., : layout.shape[-1]]


def converted(array: Any, dtype: Any, backend: Backend) -> Any:
    """A copy, converted to the dtype."""
    copy = backend.empty(array.shape, dtype)
    backend.copy(copy, array)
    return copy


def readable(name: str, layout: Layout, call: Call, backend: Backend) -> Any:
    """A copy, in a layout that kernels can read, of one of a call's arrays.

    name : of an input, an option, or ``q_dot``: a tangent.
    """
    if name in call.given:
        return copied(layout, call.arrays[name], backend)
    if name in call.options:
        return _copied_option(layout, call.options[name], backend)
    moves = name.removesuffix("_dot")
    view = call.directions[moves]
    if moves in "qkv":
        return copied(layout, view, backend)
    missing = (1,) * (len(layout.shape) - view.ndim)
    view = view.reshape(view.shape[:1] + missing + view.shape[1:])
    return _copied_option(layout, view, backend)


def copied(layout: Layout, array: Any, backend: Backend) -> Any:
    """A copy of an array in full rank, with a layout of `layouts.new`."""
    copy = new_array(layout, backend)
    backend.copy(copy, array)
    return copy


def _copied_option(layout: Layout, array: Any, backend: Backend) -> Any:
    """A copy of an option array, with a layout of `layouts.by_element`."""
    missing = (1,) * (len(layout.shape) - array.ndim)
    given = array.reshape(missing + array.shape)
    copy = backend.empty(layout.shape, layout.dtype)
    backend.copy(copy, given[tuple(slice(n) for n in layout.shape)])
    return copy
