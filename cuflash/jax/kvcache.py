"""`forward_kvcache` on JAX arrays: new tokens give new caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from cuflash import settings
from cuflash.api import foreign_names
from cuflash.api.kvcache import forward_kvcache as of_arrays
from cuflash.errors import UnsupportedError
from cuflash.request.options import ARRAYS, INDICES, KVCACHE
from cuflash.request.problem import Call, strip, strip_lse
from cuflash.request.validate import kvcache as validate
from cuflash.request.validate import kvcache_values

from . import calls, functions
from .abstract import abstract_all
from .arguments import equally_varying, with_int32
from .calls import asked_of
from .checks import check_array, check_static, on_host
from .primitives import kvcache_p

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from typing_extensions import Unpack

    from cuflash.api.types import JaxCacheOptions

_NAME = "cuflash.jax.forward_kvcache"
# Arguments that are Python values; all others are arrays.
_STATIC = (
    "head_dim_v", "max_seqlen_q", "rotary_interleaved", "scale", "causal",
    "num_splits", *(x for x in KVCACHE if x not in ARRAYS),
)  # fmt: skip


@foreign_names.our_names(
    _NAME, like=of_arrays, without=("out",), array="ArrayLike | None"
)
def forward_kvcache(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None = None,
    *positional: NoReturn,
    return_lse: bool = False,
    **options: Unpack[JaxCacheOptions],
) -> Any:
    """Attention over a cache of keys and values, of JAX arrays.

    With new tokens it returns new caches. XLA writes them into the memory of
    the old ones if nothing else needs these: inside `jax.jit`, if the caches
    are donated (`donate_argnums`) or carried by a loop (`jax.lax.scan`).
    Otherwise it copies them first.

    Parameters
    ----------
    q : jax.Array, (batch, seqlen_q, num_heads_q, head_dim)
    k_cache, v_cache : jax.Array, (batch, capacity, num_heads_kv, head_dim)
        In the dtype of `q`, or float8_e4m3fn. With `page_table`, (num_pages,
        page_size, num_heads_kv, head_dim). Without `v_cache`, values are the
        first `head_dim_v` columns of keys.
    cache_seqlens : int or integer array of shape () or (batch,), optional
        As for `cuflash.forward_kvcache`. It may change from call to call
        without compiling again, also if it is an int.
    return_lse, **options
        As for `cuflash.forward_kvcache`, with JAX arrays for arrays. Other
        numbers are Python values: they are compiled into the call.

    Returns
    -------
    out : jax.Array, (batch, seqlen_q, num_heads_q, head_dim_v)
        Alone, if nothing else is asked for.
    lse : jax.Array, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`.
    k_cache, v_cache : jax.Array
        Only with `k_new` and `v_new`: the caches, with the new tokens; the
        first alone without `v_cache`.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.forward_kvcache`, when the call is
        traced. Lengths, pages and slots are checked where the host has their
        values: on the CPU, outside `jax.jit`.
    UnsupportedError
        For derivatives: attention over caches has none.

    See Also
    --------
    cuflash.forward_kvcache : the same for CuPy and NumPy arrays; explains
        every argument.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
    >>> caches = jnp.zeros((1, 32, 4, 8)), jnp.zeros((1, 32, 4, 8))
    >>> def step(caches, i):
    ...     new = (jax.lax.dynamic_slice_in_dim(x, i, 1, 1) for x in (q, k, v))
    ...     q_new, k_new, v_new = new
    ...     out, *caches = cuflash.jax.forward_kvcache(
    ...         q_new, *caches, k_new=k_new, v_new=v_new, cache_seqlens=i
    ...     )
    ...     return tuple(caches), out[:, 0]
    >>> _, out = jax.lax.scan(step, caches, jnp.arange(16))
    >>> wanted = cuflash.jax.attention(q, k, v, causal=True)
    >>> bool(abs(jnp.moveaxis(out, 0, 1) - wanted).max() < 1e-6)
    True
    """
    foreign_names.refuse(_NAME, options, positional)
    settings.check()
    named: dict[str, Any] = {x: y for x, y in options.items() if y is not None}
    numbers = {x: named.pop(x) for x in _STATIC if x in named}
    read = functions.take_whole(numbers, functions.wide_of(q))
    given = {"q": q, "k_cache": k_cache, **named, **read}
    if v_cache is not None:
        given["v_cache"] = v_cache
    length = validate.length_or_array(given.pop("cache_seqlens", None))
    if length is not None and not validate.is_int(length):
        given["cache_seqlens"], length = length, None
    for name, array in given.items():
        check_array(name, array)
    for name, value in {**numbers, "return_lse": return_lse}.items():
        check_static(name, value)
    if isinstance(numbers.get("window"), list):
        numbers["window"] = tuple(numbers["window"])
    return _bind(given, length, numbers, return_lse)


def _bind(
    given: dict[str, Any],
    length: int | None,
    numbers: dict[str, Any],
    return_lse: Any,
) -> Any:
    rank = given["q"].ndim
    caches = "k_cache", "v_cache"
    shapes = {x: given[x].shape for x in caches if x in given}
    packed = "cu_seqlens_q" in given
    given = validate.with_batch(_of_sequences(given, packed))
    types = abstract_all(given)
    call = calls.forward_kvcache(
        **types, **numbers, return_lse=return_lse,
        **({} if length is None else {"cache_seqlens": length}),
    )  # fmt: skip
    if length is not None:
        lengths = np.full(call.problem.batch, length, np.int32)
        given["cache_seqlens"] = lengths
    given = with_int32(given)
    asked = asked_of(numbers, {})
    made = calls.kvcache(tuple(given), asked, return_lse)
    _check_values(made.check(abstract_all(given)), given)
    found = kvcache_p.bind(
        *equally_varying(list(given.values())),
        names=tuple(given), asked=asked, return_lse=call.return_lse,
    )  # fmt: skip
    out, *others = found
    if not packed:
        out = strip(out, rank)
        others[: call.return_lse] = [
            strip_lse(x, rank) for x in others[: call.return_lse]
        ]
    results = dict(zip(made.results, (out, *others), strict=True))
    for name, shape in shapes.items():
        if name in results:
            results[name] = results[name].reshape(shape)
    return tuple(results.values()) if others else out


def _of_sequences(given: dict[str, Any], packed: bool) -> dict[str, Any]:
    """The arrays; one length for all sequences becomes one for each."""
    lengths = given.get("cache_seqlens")
    if lengths is None or lengths.ndim:
        return given
    batch = given["q"].shape[:1] if given["q"].ndim == 4 else (1,)
    if packed:
        batch = (given["cu_seqlens_q"].size - 1,)
    return {**given, "cache_seqlens": jnp.broadcast_to(lengths, batch)}


def _check_values(call: Call, given: dict[str, Any]) -> None:
    """Raise for invalid lengths, pages and slots, if the host has them."""
    found = {x: on_host(given[x]) for x in call.options if x in INDICES}
    if not any(x is None for x in found.values()):
        kvcache_values.values(Call(call.signature, {}, None, found))


def _no_derivatives(
    operands: Sequence[Any], tangents: Sequence[Any], *, names: Any, **_: Any
) -> NoReturn:
    name = next(
        x for x, y in zip(names, tangents, strict=True)
        if type(y) is not ad.Zero
    )  # fmt: skip
    raise UnsupportedError(
        f"{name} is differentiated, and attention over caches has no "
        f"derivatives: pass jax.lax.stop_gradient({name}), or write "
        "cuflash.jax.attention of all keys and values"
    )


ad.primitive_jvps[kvcache_p] = _no_derivatives
