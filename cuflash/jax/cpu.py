"""The lowerings for CPUs: XLA calls the NumPy path."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from cuflash.api import attention as api_attention
from cuflash.api import derivatives as api_derivatives
from cuflash.api import kvcache as api_kvcache
from cuflash.api import readout as api_readout
from cuflash.api import readout_gradients as api_readout_gradients
from cuflash.request.mod_tangents import joined_tangents
from cuflash.request.readout import READOUT_GRADIENTS, READOUTS

from . import functions
from .calls import Traced
from .primitives import MADE_BY

Callback: TypeAlias = Callable[..., None]  # of a call, by XLA

# By a call's name: its module, and what it requires though it may be None.
_APIS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "forward": (api_attention, ()),
    "backward": (api_attention, ()),
    "jvp": (api_derivatives, ("q_dot", "k_dot", "v_dot")),
    "double_backward": (api_derivatives, ("ddq", "ddk", "ddv")),
    "forward_kvcache": (api_kvcache, ()),
    **{x: (api_readout, ()) for x in READOUTS},
    **{x: (api_readout_gradients, ()) for x in READOUT_GRADIENTS},
}

# Results that calls store where they are told, but for those of some modules.
_IN_PLACE = "out", "dq", "dk", "dv"
_OWN_RESULTS = api_readout, api_readout_gradients


def _types(avals: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _callback(call: Traced) -> Callback:
    """What XLA calls: the call on NumPy arrays that share its buffers."""
    direction = call.validate.__name__
    module, required = _APIS[direction]
    in_place = () if module in _OWN_RESULTS else _IN_PLACE

    def run(context: Any, results: Any, *buffers: Any) -> None:
        arrays: dict[str, Any] = dict.fromkeys(required)
        arrays |= call.named([*map(np.asarray, buffers)])
        if "seed" in arrays:
            arrays["seed"] = int(arrays["seed"]) % 2**64
        named = zip(call.results, map(np.asarray, results), strict=True)
        into = dict(named)
        arrays |= {name: into.pop(name) for name in call.updated}
        placed = {name: into[name] for name in in_place if name in into}
        arguments = dict(call.arguments)
        arguments |= joined_tangents(arrays)
        functions.with_arrays(arrays, arguments)
        if "chosen" in arrays:  # as `weight_sums` calls flags
            arrays["queries"] = arrays.pop("chosen")
        api = getattr(module, direction)
        found = api(**arrays, **placed, **arguments)
        found = found if isinstance(found, tuple) else (found,)
        found = [
            y
            for x in found  # gradients of `mod_arrays` are a dict
            for y in (x.values() if isinstance(x, dict) else (x,))
        ]
        for name, x in zip(call.returned, found, strict=True):
            if name in into and name not in placed:
                into[name][...] = x

    return run


def _lower(traced: Callable[..., Traced]) -> mlir.LoweringRule:
    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        made = traced(**params)
        first = len(made.results) - len(made.updated)
        call = buffer_callback(
            _callback(made),
            _types(context.avals_out),
            input_output_aliases={
                made.inputs.index(x): first + i
                for i, x in enumerate(made.updated)
            },
        )
        lower = mlir.lower_fun(call, multiple_results=True)
        return lower(context, *operands)

    return rule


def register() -> None:
    """Lower attention for CPUs to the NumPy path."""
    for primitive, traced in MADE_BY:
        mlir.register_lowering(primitive, _lower(traced), platform="cpu")


register()
