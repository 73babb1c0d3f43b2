"""vmap: the mapped axis joins batch, or calls run one after another.

It joins batch where elements of a batch are independent of each other's index.
Packed sequences have no batch axis, dropout depends on the index in a batch,
and the gradient of sink is summed over the batch: these run by `jax.lax.map`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .calls import Asked
from .primitives import attention_p, gradients_p, tangent_p

Names = tuple[str, ...]

# The rank with a batch axis. Without one, a batch shares the array.
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
    wrt = params.get("wrt", ())
    if not _is_folded(inputs, mapped, params["asked"], wrt):
        results = _one_by_one(bind, front, mapped)
        return results, [0] * len(results)
    given = dict(zip(inputs, front, strict=True))
    moves = dict(zip(inputs, mapped, strict=True))
    size = front[mapped.index(True)].shape[0]
    fold = _Fold(size, given["q"].shape[moves["q"]], wrt)
    folded = bind(*map(fold.joined, inputs, front, mapped))
    results = []
    for name, x in zip(outputs, folded, strict=False):
        like = name if name in wrt else "q"
        results.append(fold.split(x, given[like].shape[moves[like]]))
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


@dataclass(frozen=True)
class _Fold:
    """Joins the mapped axis and batch.

    Attributes
    ----------
    size, batch : int
        The lengths of the two axes.
    wrt : tuple of str
        The arrays whose gradients are computed.
    """

    size: int
    batch: int
    wrt: Names

    def joined(self, name: str, x: Any, is_mapped: bool) -> Any:
        """An operand for ``size * batch`` sequences."""
        if name in ("sink", "seed"):
            return x
        if not is_mapped:
            if self._is_shared(name, x):
                return x
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        if name in _RANK:
            if x.ndim == _RANK[name]:  # has no batch axis
                x = x[:, None]
            x = jnp.broadcast_to(x, (self.size, self.batch, *x.shape[2:]))
        return x.reshape(self.size * self.batch, *x.shape[2:])

    def _is_shared(self, name: str, x: Any) -> bool:
        """Whether an operand serves any number of sequences as it is."""
        if name not in _RANK or name in self.wrt:
            return False
        broadcasts = name in ("bias", "mask") and x.shape[0] == 1
        return broadcasts or x.ndim < _RANK[name]

    def split(self, x: Any, batch: int) -> Any:
        """A result by mapped index; summed for an array with batch 1."""
        x = x.reshape(self.size, self.batch, *x.shape[1:])
        if batch != self.batch:
            x = x.sum(axis=1, keepdims=True)
        return x


for _primitive, _names in (
    (attention_p, _attention_names),
    (tangent_p, _tangent_names),
    (gradients_p, _gradient_names),
):
    batching.primitive_batchers[_primitive] = functools.partial(
        _rule, _primitive, _names
    )
