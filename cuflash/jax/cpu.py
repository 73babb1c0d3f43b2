"""The lowerings for CPUs: XLA calls the NumPy path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from cuflash.api import attention as api_attention
from cuflash.api import derivatives as api_derivatives
from cuflash.request.vmap import Names

from .calls import (
    Asked,
    forward_arguments,
    gradient_arguments,
    gradient_inputs,
    gradient_names,
    second_arguments,
    second_inputs,
    second_names,
    tangent_arguments,
    tangent_inputs,
)
from .primitives import attention_p, gradients_p, second_gradients_p, tangent_p

Callback: TypeAlias = Callable[..., None]  # of a call, by XLA


def _types(avals: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _arrays(names: Names, buffers: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, buffer in zip(names, buffers, strict=True):
        arrays[name] = np.asarray(buffer)
    if "seed" in arrays:
        arrays["seed"] = int(arrays["seed"]) % 2**64
    return arrays


def _forward(names: Names, asked: Asked, return_lse: bool) -> Callback:
    arguments = forward_arguments(asked)

    def run(context: Any, results: Any, *buffers: Any) -> None:
        out, *lse = map(np.asarray, results)
        given = _arrays(names, buffers) | arguments
        got = api_attention.forward(**given, out=out, return_lse=bool(lse))
        if lse:
            lse[0][...] = got[1]

    return run


def _backward(
    names: Names, asked: Asked, wrt: Names, has_dlse: bool
) -> Callback:
    inputs = gradient_inputs(names, has_dlse)
    arguments = gradient_arguments(asked, wrt)

    def run(context: Any, results: Any, *buffers: Any) -> None:
        into = dict(zip(wrt, map(np.asarray, results), strict=True))
        given = _arrays(inputs, buffers) | {
            f"d{name}": into[name] for name in ("q", "k", "v") if name in into
        }
        gradients = api_attention.backward(**given, **arguments)
        got = dict(zip(gradient_names(wrt), gradients, strict=True))
        for name in gradient_names(wrt)[3:]:
            into[name][...] = got[name]

    return run


def _tangent(
    names: Names, wrt: Names, asked: Asked, return_lse: bool, several: bool
) -> Callback:
    inputs, arguments = tangent_inputs(names, wrt), tangent_arguments(asked)
    missing: dict[str, Any] = dict.fromkeys(("q_dot", "k_dot", "v_dot"))

    def run(context: Any, results: Any, *buffers: Any) -> None:
        given = _arrays(inputs, buffers)
        del given["out"], given["lse"]
        given = missing | given | arguments
        got = api_derivatives.jvp(**given, return_lse=True)
        for into, x in zip(results, got[2:], strict=False):
            np.asarray(into)[...] = x

    return run


def _second_gradients(
    names: Names, asked: Asked, moved: Names, wrt: Names, has_dlse: bool
) -> Callback:
    inputs = second_inputs(names, moved, has_dlse)
    arguments = second_arguments(asked, wrt, has_dlse)
    returned = second_names(wrt, has_dlse)
    wanted = (*wrt, *("out", "lse")[: 1 + has_dlse])
    missing: dict[str, Any] = dict.fromkeys(("ddq", "ddk", "ddv"))

    def run(context: Any, results: Any, *buffers: Any) -> None:
        given = missing | _arrays(inputs, buffers) | arguments
        found = api_derivatives.double_backward(**given)
        got = dict(zip(returned, found, strict=True))
        for name, into in zip(wanted, results, strict=True):
            np.asarray(into)[...] = got[name]

    return run


def _lower(make: Callable[..., Callback]) -> mlir.LoweringRule:
    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        call = buffer_callback(make(**params), _types(context.avals_out))
        lower = mlir.lower_fun(call, multiple_results=True)
        return lower(context, *operands)

    return rule


def register() -> None:
    """Lower attention for CPUs to the NumPy path."""
    for primitive, make in (
        (attention_p, _forward),
        (tangent_p, _tangent),
        (gradients_p, _backward),
        (second_gradients_p, _second_gradients),
    ):
        mlir.register_lowering(primitive, _lower(make), platform="cpu")


register()
