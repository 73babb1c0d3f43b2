"""Lets torch's Inductor write calls of `direct` in place of operators.

That takes interfaces of Inductor which are not public. Each is looked at
before it is used. Where one is missing or other than it was (another version
of torch), and wherever Inductor does not write Python, compiled code calls the
operators: the results are the same, and a call takes its caller longer.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import direct

_LOWERING = "torch._inductor.lowering"
_NAMES = (
    "attention", "attention_backward", "plain_attention",
    "plain_attention_backward",
)  # fmt: skip


def register_lowerings() -> None:
    """Tell Inductor of the operators, once it has been imported.

    The operators' fake kernels call this, which run in each compilation:
    importing Inductor takes seconds.
    """
    if _LOWERING in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    lowering = sys.modules[_LOWERING]
    if not is_usable(lowering):
        return
    for name in _NAMES:
        overload = getattr(direct.OPERATORS, name).default
        # As Inductor itself registers an operator that it does not know.
        tag = torch._library.utils.get_layout_constraint_tag(overload)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(overload, constraint, warn=False)
        own = lowering.lowerings.get(overload)
        if own is not None:
            lowering.lowerings[overload] = _lowering(name, overload, own)


def is_usable(lowering: Any) -> bool:
    """Whether Inductor has the functions that `_register` calls."""
    utils = torch._library.utils
    try:
        for function, args, keywords in (
            (lowering.make_fallback, (None, None), {"warn": False}),
            (lowering.tag_to_layout_constraint, (None,), {}),
            (utils.get_layout_constraint_tag, (None,), {}),
        ):
            inspect.signature(function).bind(*args, **keywords)
        return isinstance(lowering.lowerings, dict)
    except (AttributeError, TypeError, ValueError):
        return False


def _lowering(name: str, overload: Any, own: Any) -> Any:
    """Inductor's `own` function that makes nodes of an operator's call."""
    from torch._inductor.virtualized import V

    @functools.wraps(own)
    def lower(*args: Any, **kwargs: Any) -> Any:
        results = own(*args, **kwargs)
        call = call_of(results, overload)
        node = getattr(V.graph, "current_node", None)
        is_known = getattr(node, "target", None) is overload
        if call is not None and is_known and _writes_python(V.graph):
            function = _function(name, node)
            call.python_kernel_name = f"{direct.NAME}.{function}"
        return results

    return lower


def call_of(results: Sequence[Any], overload: Any) -> Any:
    """Inductor's node that calls an operator, by the call's results.

    None unless it holds the text by which Python code calls the operator.
    """
    try:
        # The box of a buffer, the buffer, which is a result of the call.
        call = results[0].data.data.inputs[0]
        text, target = call.python_kernel_name, call.op_overload
    except (AttributeError, IndexError, TypeError):
        return None
    is_known = target is overload and text == f"torch.ops.{overload}"
    return call if is_known else None


def _writes_python(graph: Any) -> bool:
    """Whether Inductor writes Python, no C++ and no graph."""
    no_text = getattr(graph, "fx_wrapper", False)
    return not (getattr(graph, "cpp_wrapper", True) or no_text)


def _function(name: str, node: Any) -> str:
    """The function of `direct` for an operator's call."""
    used = {x.args[1] for x in node.users if x.target is operator.getitem}
    return name if "_backward" in name or 1 in used else f"{name}_out"
