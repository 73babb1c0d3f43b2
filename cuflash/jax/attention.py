"""The public function: check, bring to full rank, bind the primitive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import jax

from cuflash import settings
from cuflash.api import foreign_names
from cuflash.api.foreign_names import split_options
from cuflash.request.options import FORWARD
from cuflash.request.problem import strip, strip_lse

from . import batching, calls, cpu, cuda, derivatives, functions  # noqa: F401  (rules)
from .abstract import abstract_all
from .arguments import check_offsets, equally_varying, full, with_int32
from .calls import Asked, asked_of
from .checks import check_array, check_static
from .primitives import attention_p

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from typing_extensions import Unpack

    from cuflash.api.types import JaxOptions

_NAME = "cuflash.jax.attention"


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[JaxOptions],
) -> jax.Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[JaxOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool,
    **options: Unpack[JaxOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@foreign_names.our_names(_NAME, FORWARD, "ArrayLike | None")
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *positional: NoReturn,
    scale: float | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    precision: str | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    seed: Any = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention, differentiable in reverse and forward mode.

    Works under `jax.jit`, `jax.grad`, `jax.jvp`, `jax.linearize`,
    `jax.hessian`, `jax.vmap`, `jax.checkpoint`, `jax.lax.scan` and
    `jax.shard_map`.

    Parameters
    ----------
    q, k, v : jax.Array, (batch, seqlen, heads, head_dim)
        As for `cuflash.forward`. **3-D is (seqlen, heads, head_dim), 2-D is
        (seqlen, head_dim)**: split the width of (batch, seqlen, width) into
        heads first.
    scale, causal, precision, num_splits, **options
        As for `cuflash.forward`, with JAX arrays for arrays. Numbers are
        Python values: they are compiled into the call, so under `jax.jit`
        they are static arguments.
    block_q, block_k : int, optional
        Tile sizes of the forward pass.
    return_lse : bool, optional
        Whether to return `lse` too.
    deterministic : bool, optional
        Whether the gradients are summed in a fixed order: see
        `cuflash.backward`.
    seed : int or integer array of shape (), optional
        Required with `dropout`. An int is compiled into the call. An array
        may differ from step to step; on a GPU, the host then waits for it in
        each call.

    Returns
    -------
    out : jax.Array
        As from `cuflash.forward`.
    lse : jax.Array
        Only with `return_lse`.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.forward`, when the call is traced; also
        if a Python value is a tracer, if float64 arrays are given without
        ``jax_enable_x64``, and for derivatives with respect to other arrays
        than `q`, `k`, `v`, `bias`, `sink` and those that functions read.

    See Also
    --------
    cuflash.forward : the same for CuPy and NumPy arrays.

    Notes
    -----
    ``docs/guide/jax.md`` tells what XLA knows of the call, how vmap runs it,
    and what differs from `jax.nn.dot_product_attention`.

    Examples
    --------
    >>> import jax
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> def loss(q, k, v):
    ...     return (cuflash.jax.attention(q, k, v, causal=True) ** 2).sum()
    >>> dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    >>> dq.shape
    (2, 16, 4, 8)
    """
    numbers, arrays = split_options(_NAME, options, positional)
    settings.check()
    read: dict[str, Any] = {}
    if numbers:
        read = functions.take(numbers, arrays, functions.wide_of(q))
    given: dict[str, Any] = {"q": q, "k": k, "v": v, **arrays, **read}
    if isinstance(seed, jax.Array):
        given["seed"] = seed
    elif seed is not None:
        numbers["seed"] = seed
    if isinstance(numbers.get("window"), list):
        numbers["window"] = tuple(numbers["window"])
    arguments = {
        "scale": scale,
        "causal": causal,
        "block_q": block_q,
        "block_k": block_k,
        "precision": precision,
        "num_splits": num_splits,
        "deterministic": deterministic,
    }
    for name, array in given.items():
        check_array(name, array)
    static = {**arguments, **numbers, "return_lse": return_lse}
    for name, value in static.items():
        check_static(name, value)
    return _bind(given, asked_of(arguments, numbers), return_lse)


def _bind(given: dict[str, Any], asked: Asked, return_lse: Any) -> Any:
    types = abstract_all(given)
    call = calls.forward(tuple(given), asked, return_lse).check(types)
    given = with_int32(given)
    packed = "cu_seqlens_q" in given
    if packed:
        check_offsets(given, call)
    else:
        given = {name: full(name, x, call.rank) for name, x in given.items()}
    results = attention_p.bind(
        *equally_varying(list(given.values())),
        names=tuple(given),
        asked=asked,
        return_lse=call.return_lse,
    )
    if not packed:
        results = [_stripped(x, call.rank) for x in results]
    return tuple(results) if call.return_lse else results[0]


def _stripped(array: Any, rank: int) -> Any:
    """A result without the axes that q left out: out has 4, lse 3."""
    return strip(array, rank) if array.ndim == 4 else strip_lse(array, rank)
