"""vmap: the mapped axis joins batch, or calls run one after another.

`request.vmap` says which. Those that do not join run by `jax.lax.map`. If only
the tangents of a call are mapped, as by `jax.jacfwd`, the mapped axis is that
of the call's directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from cuflash.request.mod_tangents import with_gradients
from cuflash.request.vmap import Fold, Names, is_folded

from . import functions
from .primitives import (
    attention_p,
    gradients_p,
    gradients_tangent_p,
    kvcache_p,
    readout_p,
    second_gradients_p,
    second_tangent_p,
    tangent_p,
)

# A call's inputs and outputs by name, and how many of its first inputs are
# tangents or cotangents; each has the name of the array that it belongs to.
Named: TypeAlias = tuple[Names, Names, int]
Results: TypeAlias = tuple[list[Any], list[int]]


def _attention_names(names: Names, **_: Any) -> Named:
    return names, ("out", "lse"), 0


def _tangent_names(names: Names, wrt: Names, **_: Any) -> Named:
    return (*wrt, *names, "out", "lse"), ("out", "lse"), len(wrt)


def _second_tangent_names(
    names: Names, moved: Names, wrt: Names, **_: Any
) -> Named:
    inputs = (*wrt, *moved, *names, "out", "lse")
    return inputs, ("out", "lse"), len(wrt) + len(moved)


def _gradient_names(
    names: Names, wrt: Names, has_dlse: bool, **_: Any
) -> Named:
    cotangents = ("out", "lse")[: 1 + has_dlse]
    return (*cotangents, *names, "out", "lse"), wrt, 0


def _moved_gradient_names(
    names: Names, moved: Names, wrt: Names, has_dlse: bool, **_: Any
) -> Named:
    inputs, outputs, _n = _gradient_names(names, wrt, has_dlse)
    return (*moved, *inputs), outputs, len(moved)


def _second_gradient_names(
    names: Names, moved: Names, wrt: Names, has_dlse: bool, **_: Any
) -> Named:
    inputs, _wrt, _n = _gradient_names(names, wrt, has_dlse)
    outputs = (*wrt, *("out", "lse")[: 1 + has_dlse])
    return (*moved, *inputs), outputs, len(moved)


def _readout_rule(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    names: Names,
    **params: Any,
) -> Results:
    bind = functools.partial(readout_p.bind, names=names, **params)
    mapped = [axis is not None for axis in axes]
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    asked = dict(params["asked"])
    wrt = ("q", "k", "lse", *with_gradients(asked))
    of_batch = functions.of_batch(asked)
    if not is_folded(names, mapped, of_batch, wrt):
        results = _one_by_one(bind, front, mapped)
        return results, [0] * len(results)
    size = front[mapped.index(True)].shape[0]
    at = names.index("q")
    batch = front[at].shape[mapped[at]]
    fold = Fold(size, batch, wrt, jnp.broadcast_to)
    results = bind(*map(fold.joined, names, front, mapped))
    return [fold.split(x, batch) for x in results], [0] * len(results)


# Of `forward_kvcache`: what all sequences share, and what says where each of
# them is, so that it has no batch of its own.
_SHARED = frozenset(("rotary_cos", "rotary_sin", "k_scale", "v_scale"))
_PLACES = frozenset(("page_table", "cache_batch_idx", "cu_seqlens_q"))


def _kvcache_rule(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    names: Names,
    **params: Any,
) -> Results:
    bind = functools.partial(kvcache_p.bind, names=names, **params)
    mapped = [axis is not None for axis in axes]
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    moved = {x for x, each in zip(names, mapped, strict=True) if each}
    joins = _PLACES.isdisjoint(names) and _SHARED.isdisjoint(moved)
    of_batch = functions.of_batch(dict(params["asked"]))
    if not joins or not is_folded(names, mapped, of_batch, ()):
        results = _one_by_one(bind, front, mapped)
        return results, [0] * len(results)
    size = front[mapped.index(True)].shape[0]
    at = names.index("q")
    batch = front[at].shape[mapped[at]]
    fold = Fold(size, batch, (), jnp.broadcast_to)
    results = bind(*[
        x if name in _SHARED else fold.joined(name, x, each)
        for name, x, each in zip(names, front, mapped, strict=True)
    ])  # fmt: skip
    return [fold.split(x, batch) for x in results], [0] * len(results)


def _rule(
    primitive: Primitive,
    names_of: Callable[..., Named],
    operands: Sequence[Any],
    axes: Sequence[int | None],
    **params: Any,
) -> Results:
    inputs, outputs, num_moved = names_of(**params)
    bind = functools.partial(primitive.bind, **params)
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    wrt = tuple({*inputs[:num_moved], *outputs} - {"out", "lse"})
    asked = dict(params["asked"])
    of_batch = "dropout" in asked or functions.of_batch(asked)
    if not is_folded(inputs, mapped, of_batch, wrt):
        results = _one_by_one(bind, front, mapped)
        return results, [0] * len(results)
    given = dict(zip(inputs, front, strict=True))
    moves = dict(zip(inputs, mapped, strict=True))
    size = front[mapped.index(True)].shape[0]
    batches = {name: x.shape[moves[name]] for name, x in given.items()}
    fold = Fold(size, batches["q"], wrt, jnp.broadcast_to)
    directed = _directed(**params)
    folded = bind(*[
        (_over_directions if index in directed else _joined)(fold, *operand)
        for index, operand in enumerate(
            zip(inputs, front, mapped, strict=True)
        )
    ])  # fmt: skip
    split, axis = fold.split, 0
    if directed:
        split, axis = jax.vmap(fold.split, (0, None)), 1
    results = [
        split(x, batches[name if name in wrt else "q"])
        for name, x in zip(outputs, folded, strict=False)
    ]
    return results, [axis] * len(results)


def _directed(
    wrt: Names = (), moved: Names = (), several: bool = False, **_: Any
) -> range:
    """The operands that have an axis of directions before the others."""
    if not several:
        return range(0)
    # Of a second tangent, the directions are those of the first.
    return range(len(wrt), len(wrt) + len(moved)) if moved else range(len(wrt))


def _joined(fold: Fold, name: str, x: Any, is_mapped: bool) -> Any:
    return fold.joined(name, x, is_mapped)


def _over_directions(fold: Fold, name: str, x: Any, is_mapped: bool) -> Any:
    join = functools.partial(fold.joined, name, is_mapped=is_mapped)
    return jax.vmap(join, in_axes=int(is_mapped))(x)


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


def _tangent_rule(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    wrt: Names,
    several: bool,
    **params: Any,
) -> Results:
    """`_rule`, where mapped tangents become directions."""
    n = len(wrt)
    if any(axis is not None for axis in axes[n:]):
        return _rule(
            *(tangent_p, _tangent_names, operands, axes),
            wrt=wrt, several=several, **params,
        )  # fmt: skip
    size = next(
        x.shape[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    moved = [
        _directions(x, axis, size, several)
        for x, axis in zip(operands[:n], axes[:n], strict=True)
    ]
    results = tangent_p.bind(
        *moved, *operands[n:], wrt=wrt, several=True, **params
    )
    if several:
        num = results[0].shape[0] // size
        results = [x.reshape(size, num, *x.shape[1:]) for x in results]
    return results, [0] * len(results)


def _directions(x: Any, axis: int | None, size: int, several: bool) -> Any:
    """A tangent whose first axis is the mapped one, and directions so far."""
    if axis is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    else:
        x = jnp.moveaxis(x, axis, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:]) if several else x


for _primitive, _names in (
    (attention_p, _attention_names),
    (gradients_p, _gradient_names),
    (gradients_tangent_p, _moved_gradient_names),
    (second_gradients_p, _second_gradient_names),
    (second_tangent_p, _second_tangent_names),
):
    batching.primitive_batchers[_primitive] = functools.partial(
        _rule, _primitive, _names
    )
batching.primitive_batchers[tangent_p] = _tangent_rule
batching.primitive_batchers[readout_p] = _readout_rule
batching.primitive_batchers[kvcache_p] = _kvcache_rule
