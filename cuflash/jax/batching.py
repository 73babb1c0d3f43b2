"""vmap: the mapped axis joins batch, or calls run one after another.

It joins batch where elements of a batch are independent of each other's index.
Packed sequences have no batch axis, dropout depends on the index in a batch,
and the gradient of sink is summed over the batch: these run by `jax.lax.map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .calls import Asked
from .primitives import attention_p, gradients_p, tangent_p

Names = tuple[str, ...]

# Without a batch axis in front, these are the same for all of a batch.
_RANK = {"bias": 4, "mask": 4, "alibi_slopes": 2, "segment_ids_q": 2,
         "segment_ids_k": 2}  # fmt: skip


def _attention_names(names: Names, **_: Any) -> tuple[Names, Names]:
    return names, ("out", "lse")


def _tangent_names(names: Names, wrt: Names, **_: Any) -> tuple[Names, Names]:
    return (*wrt, *names, "out", "lse"), ("out", "lse")


def _gradient_names(
    names: Names, wrt: Names, has_dlse: bool, **_: Any
) -> tuple[Names, Names]:
    cotangents = ("out", "lse")[: 1 + has_dlse]
    return (*cotangents, *names, "out", "lse"), wrt


def _rule(
    primitive: Primitive,
    names_of: Callable[..., tuple[Names, Names]],
    operands: Sequence[Any],
    axes: Sequence[int | None],
    **params: Any,
) -> tuple[list[Any], list[int]]:
    inputs, outputs = names_of(**params)
    bind = functools.partial(primitive.bind, **params)
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    size = front[mapped.index(True)].shape[0]
    if _is_folded(inputs, mapped, params["asked"], params.get("wrt", ())):
        results = _folded(
            bind, inputs, outputs, front, mapped, size, params.get("wrt", ())
        )
    else:
        results = _one_by_one(bind, front, mapped)
    return results, [0] * len(results)


def _is_folded(
    inputs: Names, mapped: Sequence[bool], asked: Asked, wrt: Names
) -> bool:
    """Whether the mapped axis can join batch."""
    own = {x for x, is_mapped in zip(inputs, mapped, strict=True) if is_mapped}
    by_index = "cu_seqlens_q" in inputs or "dropout" in dict(asked)
    return not (by_index or own & {"sink", "seed"} or "sink" in wrt)


def _one_by_one(
    bind: Callable[..., Any], front: Sequence[Any], mapped: Sequence[bool]
) -> list[Any]:
    moving = [x for x, each in zip(front, mapped, strict=True) if each]

    def call(slices: Sequence[Any]) -> Any:
        rest = iter(slices)
        return bind(*[
            next(rest) if each else x
            for x, each in zip(front, mapped, strict=True)
        ])  # fmt: skip

    return list(jax.lax.map(call, moving))


def _folded(
    bind: Callable[..., Any],
    inputs: Names,
    outputs: Names,
    front: Sequence[Any],
    mapped: Sequence[bool],
    size: int,
    wrt: Names,
) -> list[Any]:
    given = dict(zip(inputs, front, strict=True))
    is_mapped = dict(zip(inputs, mapped, strict=True))
    batch = given["q"].shape[int(is_mapped["q"])]

    def fold(name: str, x: Any, moves: bool) -> Any:
        if name in _RANK and not moves and name not in wrt:
            if x.ndim < _RANK[name] or x.shape[0] == 1:
                return x  # the same for all of the batch
        elif name in ("sink", "seed"):
            return x
        if not moves:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if name in _RANK:
            if x.ndim == _RANK[name]:  # has no batch axis
                x = x[:, None]
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    results = bind(*map(fold, inputs, front, mapped))

    def unfold(name: str, x: Any) -> Any:
        x = x.reshape(size, batch, *x.shape[1:])
        if name == "bias":
            shared = given["bias"].shape[int(is_mapped["bias"])] != batch
            if shared:
                x = x.sum(axis=1, keepdims=True)
        return x

    return list(map(unfold, outputs, results))


for _primitive, _names in (
    (attention_p, _attention_names),
    (tangent_p, _tangent_names),
    (gradients_p, _gradient_names),
):
    batching.primitive_batchers[_primitive] = functools.partial(
        _rule, _primitive, _names
    )
