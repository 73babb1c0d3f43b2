"""Three primitives: attention, its tangent, and its gradients.

    attention:  q, k, v, ...                   -> out, lse
    tangent:    dq, dk, dv, ...; q, k, v, ...  -> dout, dlse   JVP
    gradients:  dout, dlse; q, k, v, ...       -> dq, dk, dv   its transpose

The tangent is linear in its first operands, as JAX's reverse mode requires,
and never runs: reverse mode transposes it. A lowering of it would add forward
mode, which `jax.custom_vjp` rules out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from cuflash.errors import UnsupportedError

from .arrays import abstract
from .calls import DIFFERENTIABLE, Asked, backward_call, gradient_inputs

_FORWARD_MODE = (
    "cuflash.jax.attention has no forward mode (jax.jvp, jax.jacfwd, "
    "jax.hessian, jax.linearize's function): use reverse mode (jax.grad, "
    "jax.vjp, jax.jacrev)"
)
_SECOND_ORDER = (
    "cuflash.jax.attention has no second derivatives: its gradients cannot "
    "be differentiated (stop them with jax.lax.stop_gradient)"
)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=1024)
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    def run(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # else bind would come here again
            return compiled(**params)(*operands)

    primitive.def_impl(run)
    return primitive


attention_p = _primitive("cuflash_attention")
tangent_p = _primitive("cuflash_attention_tangent")
gradients_p = _primitive("cuflash_attention_gradients")


# ---- Shapes ----


def lse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of out's shape; without batch, sequences are packed."""
    *batch, tokens, heads, _ = shape
    return (*batch, heads, tokens)


def lse_dtype(dtype: Any) -> np.dtype:
    """The dtype of lse for inputs of a dtype."""
    return np.dtype("float64" if dtype == np.float64 else "float32")


def _like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An abstract value on the devices of another."""
    sharding = aval.sharding
    if any(axis is not None for axis in sharding.spec):
        raise UnsupportedError(
            f"an array has sharding {sharding.spec} over explicit axes of a "
            "mesh, expected none: call cuflash.jax.attention in "
            "jax.shard_map, over batch or heads"
        )
    if not sharding.mesh.empty:
        spec = PartitionSpec(*[None] * len(shape))
        sharding = NamedSharding(sharding.mesh, spec)
        return aval.update(
            shape=shape, dtype=dtype, sharding=sharding, weak_type=False
        )
    return aval.update(
        shape=shape, dtype=dtype, sharding=None, weak_type=False
    )


def _results(q: Any, v: Any, return_lse: bool) -> list[Any]:
    shape = (*q.shape[:-1], v.shape[-1])
    lse = _like(q, lse_shape(shape), lse_dtype(q.dtype))
    return [_like(q, shape, q.dtype), lse][: 1 + return_lse]


@attention_p.def_abstract_eval
def _attention_types(
    q: Any, k: Any, v: Any, *others: Any, return_lse: bool, **_: Any
) -> list[Any]:
    return _results(q, v, return_lse)


@tangent_p.def_abstract_eval
def _tangent_types(
    *operands: Any, wrt: tuple[str, ...], return_lse: bool, **_: Any
) -> list[Any]:
    q, _k, v = operands[len(wrt) : len(wrt) + 3]
    return _results(q, v, return_lse)


@gradients_p.def_abstract_eval
def _gradient_types(
    *operands: Any,
    names: tuple[str, ...],
    asked: Asked,
    wrt: tuple[str, ...],
    has_dlse: bool,
) -> list[Any]:
    given = dict(zip(gradient_inputs(names, has_dlse), operands, strict=True))
    types = {name: abstract(x) for name, x in given.items()}
    backward_call(types, asked, wrt)  # raises
    arrays = (given[name] for name in wrt)
    return [_like(x, x.shape, x.dtype) for x in arrays]


# ---- Derivatives ----


def _attention_jvp(
    operands: Sequence[Any],
    tangents: Sequence[Any],
    *,
    names: tuple[str, ...],
    asked: Asked,
    return_lse: bool,
) -> tuple[list[Any], list[Any]]:
    moved = {
        name: tangent
        for name, tangent in zip(names, tangents, strict=True)
        if type(tangent) is not ad.Zero
    }
    for name in moved:
        if name not in DIFFERENTIABLE:
            raise UnsupportedError(
                f"{name} is differentiated, expected one of "
                f"{', '.join(DIFFERENTIABLE)}: cuflash has no gradient of "
                f"{name} (pass jax.lax.stop_gradient({name}))"
            )
    results = attention_p.bind(
        *operands, names=names, asked=asked, return_lse=True
    )
    moving = tangent_p.bind(
        *moved.values(), *operands, *results, names=names, wrt=tuple(moved),
        asked=asked, return_lse=return_lse,
    )  # fmt: skip
    return results[: 1 + return_lse], moving


def _tangent_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    names: tuple[str, ...],
    wrt: tuple[str, ...],
    asked: Asked,
    return_lse: bool,
) -> list[Any]:
    dout, *dlse = cotangents
    # A cotangent of zero is left out, but there must be one of out.
    dlse = [x for x in dlse if type(x) is not ad.Zero]
    fixed = operands[len(wrt) :]
    gradients = gradients_p.bind(
        ad.instantiate_zeros(dout), *dlse, *fixed, names=names, wrt=wrt,
        asked=asked, has_dlse=bool(dlse),
    )  # fmt: skip
    gradients = [
        gradient if ad.is_undefined_primal(operand) else None
        for gradient, operand in zip(gradients, operands, strict=False)
    ]
    return [*gradients, *[None] * len(fixed)]


def _raises(message: str) -> Callable[..., NoReturn]:
    def rule(*operands: Any, **params: Any) -> NoReturn:
        raise UnsupportedError(message)

    return rule


def _other_platform(context: Any, *operands: Any, **params: Any) -> NoReturn:
    raise UnsupportedError(
        "cuflash.jax.attention is lowered for "
        f"{', '.join(context.module_context.platforms)}, expected cpu or cuda"
    )


ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[tangent_p] = _raises(_SECOND_ORDER)
ad.primitive_jvps[gradients_p] = _raises(_SECOND_ORDER)
mlir.register_lowering(tangent_p, _raises(_FORWARD_MODE))
mlir.register_lowering(attention_p, _other_platform)
mlir.register_lowering(gradients_p, _other_platform)
