"""The primitives: attention, and its derivatives up to the second.

    attention:        x                    -> out, lse
    tangent:          x'; x, out, lse      -> out', lse'       `jvp`
    gradients:        dout, dlse; x, ...   -> dx               `backward`
    second_tangent:   x'; x', x, ...       -> out'', lse''     never runs
    gradients_tangent: dout', dlse', x'; dout, dlse, x, ... -> dx'
    readout:          q, k, lse, ...       -> its result       `weights`, ...
                      d of it, q, k, lse, ... -> dq, dk, dlse  `*_backward`
    kvcache:          q, caches, ...       -> out, lse, caches
                                                          `forward_kvcache`
    second_gradients: ddx; dout, dlse, x, ... -> d2x, ddout, ddlse
                                                          `double_backward`

x is q, k, v and the options that have gradients (options.MOVED);
tangents before the first semicolon are what a primitive is linear in.
`derivatives` says what follows from what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from cuflash.errors import UnsupportedError
from cuflash.request.readout import weights_shape
from cuflash.request.vmap import Names

from . import calls
from .abstract import abstract_all
from .calls import Traced


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
second_tangent_p = _primitive("cuflash_attention_second_tangent")
gradients_p = _primitive("cuflash_attention_gradients")
gradients_tangent_p = _primitive("cuflash_attention_gradients_tangent")
second_gradients_p = _primitive("cuflash_attention_second_gradients")
readout_p = _primitive("cuflash_readout")
kvcache_p = _primitive("cuflash_forward_kvcache")


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
    own = None
    if not sharding.mesh.empty:
        spec = PartitionSpec(*[None] * len(shape))
        own = NamedSharding(sharding.mesh, spec)
    return aval.update(shape=shape, dtype=dtype, sharding=own, weak_type=False)


def _results(q: Any, columns: int, return_lse: bool) -> list[Any]:
    shape = (*q.shape[:-1], columns)
    lse = _like(q, lse_shape(shape), lse_dtype(q.dtype))
    return [_like(q, shape, q.dtype), lse][: 1 + return_lse]


@attention_p.def_abstract_eval
def _attention_types(
    q: Any, k: Any, v: Any, *others: Any, return_lse: bool, **_: Any
) -> list[Any]:
    return _results(q, v.shape[-1], return_lse)


@second_tangent_p.def_abstract_eval
@tangent_p.def_abstract_eval
def _tangent_types(
    *operands: Any,
    wrt: Names,
    return_lse: bool,
    several: bool,
    moved: Names = (),
    **_: Any,
) -> list[Any]:
    n = len(wrt) + len(moved)
    q, _k, v = operands[n : n + 3]
    results = _results(q, v.shape[-1], return_lse)
    if not several:
        return results
    # Of a second tangent, the directions are those of the first.
    first = operands[len(wrt) if moved else 0]
    lead = first.shape[:1]
    return [_like(x, (*lead, *x.shape), x.dtype) for x in results]


def _checked(call: Traced, operands: Any) -> dict[str, Any]:
    """The operands of a call that may be made, by name."""
    given = call.named(operands)
    call.check(abstract_all(given))
    return given


@gradients_p.def_abstract_eval
def _gradient_types(*operands: Any, wrt: Names, **params: Any) -> list[Any]:
    given = _checked(calls.backward(wrt=wrt, **params), operands)
    arrays = (given[name] for name in wrt)
    return [_like(x, x.shape, x.dtype) for x in arrays]


@gradients_tangent_p.def_abstract_eval
def _gradients_tangent_types(
    *operands: Any, moved: Names, **params: Any
) -> list[Any]:
    return _gradient_types(*operands[len(moved) :], **params)


@second_gradients_p.def_abstract_eval
def _second_gradient_types(
    *operands: Any, wrt: Names, has_dlse: bool, **params: Any
) -> list[Any]:
    call = calls.second_gradients(wrt=wrt, has_dlse=has_dlse, **params)
    given = _checked(call, operands)
    like = (*wrt, *("dout", "dlse")[: 1 + has_dlse])
    arrays = (given[name] for name in like)
    return [_like(x, x.shape, x.dtype) for x in arrays]


@readout_p.def_abstract_eval
def _readout_types(*operands: Any, **params: Any) -> list[Any]:
    traced = calls.readout(**params)
    given = traced.named(operands)
    call = traced.check(abstract_all(given))
    problem, q, lse = call.problem, given["q"], given["lse"]
    assert problem.readout is not None
    if problem.direction == "weights":
        shape = weights_shape(problem)[4 - call.rank :]
        return [_like(q, shape, np.dtype(problem.readout.dtype))]
    if problem.direction == "weight_sums":
        shape = (*lse.shape[:-1], problem.seqlen_k)
        return [_like(q, shape, lse.dtype)]
    if problem.direction == "entropy":
        return [_like(q, lse.shape, lse.dtype)]
    like = (given[x.removeprefix("d")] for x in traced.results)
    return [_like(x, x.shape, x.dtype) for x in like]


@kvcache_p.def_abstract_eval
def _kvcache_types(
    *operands: Any, names: Names, return_lse: bool, **params: Any
) -> list[Any]:
    call = calls.kvcache(names, return_lse=return_lse, **params)
    given = call.named(operands)
    columns = call.check(abstract_all(given)).problem.head_dim_v
    caches = (given[x] for x in call.updated)
    return [
        *_results(given["q"], columns, return_lse),
        *(_like(x, x.shape, x.dtype) for x in caches),
    ]


def _other_platform(context: Any, *operands: Any, **params: Any) -> NoReturn:
    raise UnsupportedError(
        "cuflash.jax.attention is lowered for "
        f"{', '.join(context.module_context.platforms)}, expected cpu or cuda"
    )


# The primitives that run, and the calls that they make.
MADE_BY: tuple[tuple[Primitive, Callable[..., Traced]], ...] = (
    (attention_p, calls.forward),
    (tangent_p, calls.tangent),
    (gradients_p, calls.backward),
    (second_gradients_p, calls.second_gradients),
    (readout_p, calls.readout),
    (kvcache_p, calls.kvcache),
)
for _each, _ in MADE_BY:
    mlir.register_lowering(_each, _other_platform)
