"""`merge_states` on JAX arrays, by XLA, which fuses it with its neighbours."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from cuflash import settings
from cuflash.api import foreign_names
from cuflash.request.validate import merging as validate

from .abstract import abstract_all
from .checks import check_array


@foreign_names.our_names("cuflash.jax.merge_states")
def merge_states(
    out_a: jax.typing.ArrayLike,
    lse_a: jax.typing.ArrayLike,
    *more: jax.typing.ArrayLike,
    **unknown: NoReturn,
) -> tuple[jax.Array, jax.Array]:
    """Merge the results of attention over disjoint sets of keys.

    Differentiable any number of times in all arrays. Works under all of JAX's
    transforms, and on every device that XLA compiles for.

    Parameters
    ----------
    out_a : jax.Array, (batch, seqlen_q, num_heads_q, head_dim_v)
        The result of `attention` over one set of keys. **3-D is (seqlen_q,
        num_heads_q, head_dim_v), 2-D is (seqlen_q, head_dim_v)**.
    lse_a : jax.Array, (batch, num_heads_q, seqlen_q)
        Its lse, float32 (float64 for float64 `out_a`).
    *more : jax.Array
        ``out_b, lse_b, out_c, lse_c, ...``: for the same queries, the
        results over other sets of keys, any number of pairs.

    Returns
    -------
    out, lse : jax.Array
        As `attention` returns them over all the keys.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.merge_states`.

    See Also
    --------
    cuflash.merge_states : the same for CuPy and NumPy arrays, with equations.

    Notes
    -----
    With w_i = exp(lse_i - lse), the gradients of a pair are w_i dout and
    w_i (dout . (out_i - out) + dlse). A row with lse -inf has none.

    Examples
    --------
    >>> import jax
    >>> import cuflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> a, b = (
    ...     cuflash.jax.attention(q, k[:, i], v[:, i], return_lse=True)
    ...     for i in (slice(0, 10), slice(10, None))
    ... )
    >>> out, lse = cuflash.jax.merge_states(*a, *b)
    >>> bool(abs(out - cuflash.jax.attention(q, k, v)).max() < 1e-6)
    True
    """
    if unknown:
        raise foreign_names.unexpected("cuflash.jax.merge_states", unknown)
    settings.check()
    given = (out_a, lse_a, *more)
    states = validate.states_of(given)
    for name, array in states.items():
        check_array(name, array)
    types = abstract_all(states)
    validate.merge_states(**types)
    return _merged(*given)


@jax.jit
def _merged(*given: Any) -> tuple[Any, Any]:
    """The merge in the dtype of lse, out rounded once."""
    outs, lses = given[::2], given[1::2]
    # Nothing depends on the maximum, which shifts exponents only.
    m = jax.lax.stop_gradient(functools.reduce(jnp.fmax, lses))
    shift = jnp.where(m == -jnp.inf, 0, m)
    total, summed = jnp.zeros_like(m), jnp.zeros(outs[0].shape, m.dtype)
    for out, lse in zip(outs, lses, strict=True):
        weight = jnp.exp(lse - shift)
        seen = _of_rows(lse != -jnp.inf)
        row = jnp.where(seen, out.astype(weight.dtype), 0)
        total, summed = total + weight, summed + _of_rows(weight) * row
    divisor = jnp.where(total == 0, 1, total)
    merged = (summed / _of_rows(divisor)).astype(outs[0].dtype)
    # A row that sees no key, or one with lse inf, whose weights are NaN.
    ends = (total == 0) | (m == jnp.inf)
    return merged, jnp.where(ends, m, shift + jnp.log(divisor))


def _of_rows(x: Any) -> Any:
    """Numbers of rows, laid out as lse, that broadcast to out."""
    return (x if x.ndim < 2 else x.swapaxes(-1, -2))[..., None]
