"""Lets torch's Inductor write calls of `direct` in place of operators.

That takes interfaces of Inductor which are not public. With versions of torch
other than those known here, and wherever Inductor does not write Python,
compiled code calls the operators.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import direct

KNOWN = r"2\.1[1-5]\.\d+(\+.*)?"
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
    if _LOWERING in sys.modules and re.fullmatch(KNOWN, torch.__version__):
        _register()


@functools.cache
def _register() -> None:
    from torch._inductor import lowering

    for name in _NAMES:
        overload = getattr(direct.OPERATORS, name).default
        # As Inductor itself registers an operator that it does not know.
        tag = torch._library.utils.get_layout_constraint_tag(overload)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(overload, constraint, warn=False)
        register = lowering.register_lowering(
            overload, type_promotion_kind=None
        )
        register(_lowering(name, overload))


def _lowering(name: str, overload: Any) -> Callable[..., Any]:
    """The function that makes Inductor's nodes of an operator's call."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = ir.FallbackKernel.create(overload, *args, **kwargs)
        if not V.graph.cpp_wrapper:
            function = _function(name, V.graph.current_node)
            call = results[0].inputs[0]  # of which it is the first result
            call.python_kernel_name = f"{direct.NAME}.{function}"
        return tuple(map(ir.TensorBox.create, results))

    return lower


def _function(name: str, node: Any) -> str:
    """The function of `direct` for an operator's call."""
    used = {x.args[1] for x in node.users if x.target is operator.getitem}
    return name if "_backward" in name or 1 in used else f"{name}_out"
