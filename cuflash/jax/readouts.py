"""`weights`, `weight_sums` and `entropy` of JAX arrays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from cuflash import settings
from cuflash.api import foreign_names
from cuflash.api.foreign_names import split_options
from cuflash.errors import UnsupportedError
from cuflash.request.layouts import broadcasts
from cuflash.request.mod_tangents import gradients_of
from cuflash.request.options import FORWARD
from cuflash.request.problem import strip_lse
from cuflash.request.readout import COTANGENTS
from cuflash.request.traced import is_named
from cuflash.request.validate import chosen
from cuflash.request.vmap import Names

from . import calls, functions
from .abstract import abstract_all
from .arguments import check_offsets, equally_varying, full, with_int32
from .calls import Asked, asked_of
from .checks import check_array, check_static, on_host
from .primitives import readout_p

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.typing import ArrayLike

    from cuflash.api.types import Indices

_ARRAY = "ArrayLike | None"
# What has gradients.
_MOVED = "q", "k", "lse", "row_weights"


@foreign_names.our_names("cuflash.jax.weights", FORWARD, _ARRAY)
def weights(
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *positional: NoReturn,
    queries: Indices | None = None,
    keys: Indices | None = None,
    heads: Indices | None = None,
    dtype: Any = None,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> jax.Array:
    """The weights of some queries, differentiable in `q`, `k` and `lse`.

    And in arrays that `score_mod` reads. Works under `jax.jit`, `jax.grad`,
    `jax.vjp` and `jax.vmap`.

    Parameters
    ----------
    q, k : jax.Array
        As given to `attention`.
    lse : jax.Array, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: a loss reaches
        `q`, `k`, a bias and a sink by way of it too.
    queries, keys, heads : slice, indices, or integer array, optional
        As for `cuflash.weights`. Arrays may be traced: on a GPU an index that
        is out of range gives weights of 0.
    dtype : dtype, optional
        Of the result: that of `lse`, which is the default, or that of `q`.
    scale, causal, block_q, block_k, precision, **options
        As given to `attention`. `dropout` changes nothing.
    deterministic : bool, optional
        Whether gradients of what `score_mod` reads are bitwise reproducible.
        Those of `q` and `k` always are.

    Returns
    -------
    weights : jax.Array, (batch, heads, queries, keys)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.weights`, when the call is traced; an
        UnsupportedError for derivatives with respect to other arrays, and for
        second derivatives.
    TypeError
        In forward mode, of which there is none (`jax.jvp`, `jax.jacfwd`).

    See Also
    --------
    cuflash.weights : the same for CuPy and NumPy arrays, with all equations.

    Examples
    --------
    >>> import jax
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> _, lse = cuflash.jax.attention(q, k, v, return_lse=True)
    >>> cuflash.jax.weights(q, k, lse, queries=[-1]).shape
    (2, 4, 1, 16)
    """
    return _call(
        "weights", {"q": q, "k": k, "lse": lse},
        {"queries": queries, "keys": keys, "heads": heads},
        options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic,
        dtype=None if dtype is None else np.dtype(dtype).name,
    )  # fmt: skip


@foreign_names.our_names("cuflash.jax.weight_sums", FORWARD, _ARRAY)
def weight_sums(
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *positional: NoReturn,
    queries: Indices | None = None,
    row_weights: ArrayLike | None = None,
    reduce: str = "sum",
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> jax.Array:
    """How much weight each key gets from all queries, or from some.

    Differentiable in `q`, `k`, `lse`, `row_weights` and arrays that
    `score_mod` reads. Works under `jax.jit`, `jax.grad`, `jax.vjp` and
    `jax.vmap`.

    Parameters
    ----------
    q, k : jax.Array
        As given to `attention`.
    lse : jax.Array, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: a loss reaches
        `q`, `k`, a bias and a sink by way of it too.
    queries : slice, indices, flags, or array, optional
        As for `cuflash.weight_sums`. Arrays may be traced: then an index that
        is out of range chooses nothing.
    row_weights : jax.Array, optional
        Broadcastable to the shape of `lse`, in its dtype.
    reduce : {"sum", "max"}, optional
        Whether a key gets the sum over queries, or the largest.
    scale, causal, block_q, block_k, precision, deterministic, **options
        As for `weights`.

    Returns
    -------
    sums : jax.Array, (batch, num_heads_q, seqlen_k)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.weight_sums`, and as `weights`.

    See Also
    --------
    cuflash.weight_sums : the same for CuPy and NumPy arrays.

    Examples
    --------
    >>> import jax
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> _, lse = cuflash.jax.attention(q, k, v, return_lse=True)
    >>> cuflash.jax.weight_sums(q, k, lse, queries=slice(-4, None)).shape
    (2, 4, 16)
    """
    given = {"q": q, "k": k, "lse": lse}
    if row_weights is not None:
        given["row_weights"] = row_weights
    return _call(
        "weight_sums", given, {"queries": queries}, options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic, reduce=reduce,
    )  # fmt: skip


@foreign_names.our_names("cuflash.jax.entropy", FORWARD, _ARRAY)
def entropy(
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> jax.Array:
    """The entropy of each query's weights, in nats.

    Differentiable in `q`, `k`, `lse` and arrays that `score_mod` reads. Works
    under `jax.jit`, `jax.grad`, `jax.vjp` and `jax.vmap`.

    Parameters
    ----------
    q, k : jax.Array
        As given to `attention`.
    lse : jax.Array, (batch, num_heads_q, seqlen_q)
        As `attention` returned it, with ``return_lse=True``: a loss reaches
        `q`, `k`, a bias and a sink by way of it too.
    scale, causal, block_q, block_k, precision, deterministic, **options
        As for `weights`.

    Returns
    -------
    entropy : jax.Array, (batch, num_heads_q, seqlen_q)

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.entropy`, and as `weights`.

    See Also
    --------
    cuflash.entropy : the same for CuPy and NumPy arrays.

    Examples
    --------
    >>> import jax
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> def loss(q, k):
    ...     out, lse = cuflash.jax.attention(q, k, v, return_lse=True)
    ...     return out.sum() - cuflash.jax.entropy(q, k, lse).mean()
    >>> dq, dk = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k)
    >>> dq.shape
    (2, 16, 4, 8)
    """
    return _call(
        "entropy", {"q": q, "k": k, "lse": lse}, {}, options, positional,
        scale=scale, causal=causal, block_q=block_q, block_k=block_k,
        precision=precision, deterministic=deterministic,
    )  # fmt: skip


def _call(
    name: str,
    given: dict[str, Any],
    choices: dict[str, Any],
    options: dict[str, Any],
    positional: tuple[Any, ...],
    **arguments: Any,
) -> jax.Array:
    """Check a call, bring it to full rank, and make it."""
    numbers, arrays = split_options(f"cuflash.jax.{name}", options, positional)
    settings.check()
    read = functions.take(numbers, arrays, functions.wide_of(given["q"]))
    given = {**given, **arrays, **read}
    numbers.pop("seed", None)
    if "dropout" in numbers:
        numbers["seed"] = 0  # weights are those before dropout
    if isinstance(numbers.get("window"), list):
        numbers["window"] = tuple(numbers["window"])
    for each, array in given.items():
        check_array(each, array)
    for each, value in {**arguments, **numbers}.items():
        check_static(each, value)
    given |= _choices(name, choices, given["q"], given["k"])
    asked = asked_of(arguments, numbers)
    of_forward = _for(name, asked)
    types = abstract_all(given)
    call = calls.readout(name, tuple(given), of_forward).check(types)
    given = with_int32(given)
    rows = given.get("row_weights")
    if rows is not None and broadcasts(rows.shape, given["lse"].shape):
        given["row_weights"] = jnp.broadcast_to(rows, given["lse"].shape)
    packed = "cu_seqlens_q" in given
    if packed:
        check_offsets(given, call)
    else:
        given = {each: _full(each, x, call.rank) for each, x in given.items()}
    names = tuple(given)
    result = _readout(name, names, asked, equally_varying([*given.values()]))
    if packed:
        return result
    if name == "weights":
        return result[(0,) * (4 - call.rank)]
    return strip_lse(result, call.rank)


def _full(name: str, array: Any, rank: int) -> Any:
    if name in ("lse", "row_weights"):
        return jnp.expand_dims(array, tuple(range(4 - rank)))
    return full(name, array, rank)


# Of which calls an argument is; of all by default.
_OWN = {
    "dtype": ("weights",),
    "deterministic": tuple(f"{x}_backward" for x in COTANGENTS),
}


def _for(direction: str, asked: Asked) -> Asked:
    """What a direction takes of the arguments of a readout."""
    return tuple(
        (name, x) for name, x in asked
        if direction in _OWN.get(name, (direction,))
    )  # fmt: skip


# Choices ---------------------------------------------------------------------


def _choices(
    name: str, choices: dict[str, Any], q: Any, k: Any
) -> dict[str, Any]:
    """Indices, and for sums flags, of what is chosen."""
    on_host_, arrays = chosen.split(choices)
    found = {}
    for each, x in (on_host_ | arrays).items():
        length = chosen.length_of(each, {"q": q, "k": k})
        if each in arrays:
            check_array(each, x)
            values = None if jnp.issubdtype(x.dtype, bool) else on_host(x)
            x = x if values is None else values
        if not isinstance(x, jax.Array):
            of = chosen.host_queries if name == "weight_sums" else (
                functools.partial(chosen.host_indices, each)
            )  # fmt: skip
            x = of(x, length)
        found[each] = x
    if name == "weight_sums" and "queries" in found:
        return {"chosen": _flags(found["queries"], q)}
    return found


def _flags(queries: Any, q: Any) -> Any:
    """Which queries count; an index out of range is no query."""
    length = chosen.length_of("queries", {"q": q})
    if not jnp.issubdtype(queries.dtype, jnp.integer):
        return queries  # flags, or what is refused
    x = jnp.asarray(queries, jnp.int32)
    x = jnp.where(x < 0, x + length, x)
    return (x[..., None] == jnp.arange(length)).any(axis=-2)


# Derivatives -----------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _readout(name: str, names: Names, asked: Asked, arrays: list[Any]) -> Any:
    (result,) = readout_p.bind(
        *arrays, direction=name, names=names, asked=_for(name, asked)
    )
    return result


def _forward(name: str, names: Names, asked: Asked, arrays: Any) -> Any:
    moved = [
        each for each, x in zip(names, arrays, strict=True) if x.perturbed
    ]
    for each in moved:
        if each not in _MOVED and not is_named(each):
            raise UnsupportedError(
                f"{each} is differentiated, expected one of "
                f"{', '.join(_MOVED)}, an array of score_mod: "
                f"cuflash.jax.{name} has no gradient of {each} (pass "
                f"jax.lax.stop_gradient({each}))"
            )
    values = [x.value for x in arrays]
    # Names are keys: part of the structure, not arrays that may be traced.
    saved = values, dict.fromkeys(moved)
    return _readout(name, names, asked, values), saved


def _backward(
    name: str, names: Names, asked: Asked, saved: Any, cotangent: Any
) -> Any:
    arrays, moved = saved
    if isinstance(cotangent, SymbolicZero):
        return ([None] * len(arrays),)
    direction = f"{name}_backward"
    asked = _for(direction, asked)
    moving = list(_MOVED[:3])
    if "row_weights" in moved:
        asked = (*asked, ("return_drow_weights", True))
        moving.append("row_weights")
    scored = functions.scored(names, dict(asked))
    read = [x for x in names if x in moved and x in scored]
    if read:
        asked = (*asked, gradients_of(read))
    found = readout_p.bind(
        cotangent, *arrays, direction=direction,
        names=(COTANGENTS[name], *names), asked=asked,
    )  # fmt: skip
    named = dict(zip((*moving, *read), found, strict=True))
    return ([named.get(each) for each in names],)


_readout.defvjp(_forward, _backward, symbolic_zeros=True)


def _no_second(
    operands: Sequence[Any],
    tangents: Sequence[Any],
    *,
    direction: str,
    **_: Any,
) -> NoReturn:
    name = direction.removesuffix("_backward")
    raise UnsupportedError(
        f"second derivatives of cuflash.jax.{name} are not supported: stop "
        "its gradients with jax.lax.stop_gradient"
    )


ad.primitive_jvps[readout_p] = _no_second
