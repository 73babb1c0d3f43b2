"""The lowerings for CPUs: XLA calls the NumPy path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from cuflash.api import attention as api_attention
from cuflash.api import derivatives as api_derivatives
from cuflash.request.folding import Names

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


def _types(avals: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _arrays(names: Names, buffers: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, buffer in zip(names, buffers, strict=True):
        arrays[name] = np.asarray(buffer)
    if "seed" in arrays:
        arrays["seed"] = int(arrays["seed"]) % 2**64
    return arrays


def _forward(
    names: Names,
    arguments: dict[str, Any],
    context: Any,
    results: Any,
    *buffers: Any,
) -> None:
    out, *lse = map(np.asarray, results)
    given = _arrays(names, buffers) | arguments
    got = api_attention.forward(**given, out=out, return_lse=bool(lse))
    if lse:
        lse[0][...] = got[1]


def _backward(
    names: Names,
    arguments: dict[str, Any],
    wrt: Names,
    context: Any,
    results: Any,
    *buffers: Any,
) -> None:
    into = dict(zip(wrt, map(np.asarray, results), strict=True))
    given = _arrays(names, buffers) | {
        f"d{name}": x for name, x in into.items() if name in ("q", "k", "v")
    }
    gradients = api_attention.backward(**given, **arguments)
    got = dict(zip(gradient_names(wrt), gradients, strict=True))
    for name in gradient_names(wrt)[3:]:
        into[name][...] = got[name]


def _tangent(
    names: Names,
    arguments: dict[str, Any],
    context: Any,
    results: Any,
    *buffers: Any,
) -> None:
    given = _arrays(names, buffers)
    del given["out"], given["lse"]
    missing: dict[str, Any] = dict.fromkeys(("q_dot", "k_dot", "v_dot"))
    given = missing | given | arguments
    got = api_derivatives.jvp(**given, return_lse=True)
    for into, x in zip(results, got[2:], strict=False):
        np.asarray(into)[...] = x


def _second_gradients(
    names: Names,
    arguments: dict[str, Any],
    results_of: Names,
    returned: Names,
    context: Any,
    results: Any,
    *buffers: Any,
) -> None:
    missing: dict[str, Any] = dict.fromkeys(("ddq", "ddk", "ddv"))
    given = missing | _arrays(names, buffers) | arguments
    found = api_derivatives.double_backward(**given)
    got = dict(zip(returned, found, strict=True))
    for name, into in zip(results_of, results, strict=True):
        np.asarray(into)[...] = got[name]


def _lower(make: Callable[..., Callable[..., None]]) -> mlir.LoweringRule:
    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        call = buffer_callback(make(**params), _types(context.avals_out))
        lower = mlir.lower_fun(call, multiple_results=True)
        return lower(context, *operands)

    return rule


def _forward_of(
    names: Names, asked: Asked, return_lse: bool
) -> Callable[..., None]:
    return functools.partial(_forward, names, forward_arguments(asked))


def _backward_of(
    names: Names, asked: Asked, wrt: Names, has_dlse: bool
) -> Callable[..., None]:
    arguments = gradient_arguments(asked, wrt)
    given = gradient_inputs(names, has_dlse)
    return functools.partial(_backward, given, arguments, wrt)


def _tangent_of(
    names: Names, wrt: Names, asked: Asked, return_lse: bool, several: bool
) -> Callable[..., None]:
    arguments = tangent_arguments(asked)
    return functools.partial(_tangent, tangent_inputs(names, wrt), arguments)


def _second_gradients_of(
    names: Names, asked: Asked, moved: Names, wrt: Names, has_dlse: bool
) -> Callable[..., None]:
    return functools.partial(
        _second_gradients,
        second_inputs(names, moved, has_dlse),
        second_arguments(asked, wrt, has_dlse),
        (*wrt, *("out", "lse")[: 1 + has_dlse]),
        second_names(wrt, has_dlse),
    )


def register() -> None:
    """Lower attention for CPUs to the NumPy path."""
    for primitive, make in (
        (attention_p, _forward_of),
        (tangent_p, _tangent_of),
        (gradients_p, _backward_of),
        (second_gradients_p, _second_gradients_of),
    ):
        mlir.register_lowering(primitive, _lower(make), platform="cpu")


register()
