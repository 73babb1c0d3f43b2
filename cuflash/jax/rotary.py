"""`apply_rotary` on JAX arrays, by XLA, which fuses it with its neighbours."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from cuflash import settings
from cuflash.api import foreign_names
from cuflash.request.problem import Call
from cuflash.request.validate import rotary as validate

from .abstract import abstract_all
from .checks import check_array, check_static, on_host


@foreign_names.our_names("cuflash.jax.apply_rotary")
def apply_rotary(
    x: jax.typing.ArrayLike,
    cos: jax.typing.ArrayLike,
    sin: jax.typing.ArrayLike,
    *positional: NoReturn,
    positions: jax.typing.ArrayLike | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    **unknown: NoReturn,
) -> jax.Array:
    """Rotary position embedding: rotate queries or keys by their positions.

    Differentiable any number of times in `x`, `cos` and `sin`. Works under
    all of JAX's transforms, and on every device that XLA compiles for.

    Parameters
    ----------
    x : jax.Array, (batch, seqlen, heads, head_dim)
        **3-D is (seqlen, heads, head_dim), 2-D is (seqlen, head_dim)**.
    cos, sin : jax.Array, (num_positions, rotary_dim / 2)
        float32 (float64 for float64 `x`), or the dtype of `x`.
    positions : jax.Array, (batch, seqlen) or broadcastable, optional
        Of any integer dtype: each token's row of `cos` and `sin`. 0, 1, 2,
        ... along seqlen by default. A position outside the tables raises
        where the host has its value: on the CPU, outside `jax.jit`.
        Elsewhere the rotated columns of such a token are NaN.
    interleaved, inverse : bool, optional
        As for `cuflash.apply_rotary`. Python values.

    Returns
    -------
    jax.Array, like `x`

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.apply_rotary`.

    See Also
    --------
    cuflash.apply_rotary : the same for CuPy and NumPy arrays, with equations.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import cuflash.jax
    >>> angles = jnp.outer(jnp.arange(16), 100.0 ** -jnp.arange(4.0))
    >>> x = jnp.ones((2, 16, 4, 8))
    >>> cuflash.jax.apply_rotary(x, jnp.cos(angles), jnp.sin(angles)).shape
    (2, 16, 4, 8)
    """
    if unknown or positional:
        foreign_names.refuse("cuflash.jax.apply_rotary", unknown, positional)
    settings.check()
    given = {"x": x, "cos": cos, "sin": sin}
    if positions is not None:
        given["positions"] = positions
    flags = {"interleaved": interleaved, "inverse": inverse}
    for name, array in given.items():
        check_array(name, array)
    for name, value in flags.items():
        check_static(name, value)
    types = abstract_all(given)
    call = validate.apply_rotary(**types, **flags)
    values = None if positions is None else on_host(positions)
    if values is not None:
        options = {"positions": values}
        validate.positions(Call(call.signature, {}, None, options))
    return _rotated(x, cos, sin, positions, **flags)


@functools.partial(jax.jit, static_argnames=("interleaved", "inverse"))
def _rotated(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: bool,
    inverse: bool,
) -> Any:
    """Each pair (a, b) becomes (a cos - b sin, a sin + b cos).

    In float32 (float64 for float64 `x`), rounded once.
    """
    pairs = cos.shape[1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (
        _rows(table, x, positions).astype(wide) for table in (cos, sin)
    )
    if inverse:
        sin = -sin
    shape, axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    turned = x[..., : 2 * pairs].astype(wide)
    turned = turned.reshape(*x.shape[:-1], *shape)
    a, b = turned.take(0, axis), turned.take(1, axis)
    rotated = jnp.stack((a * cos - b * sin, a * sin + b * cos), axis)
    rotated = rotated.reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype)
    return jnp.concatenate((rotated, x[..., 2 * pairs :]), -1)


def _rows(table: Any, x: Any, positions: Any) -> Any:
    """A table's row of each token, NaN outside the table."""
    if positions is None:
        rows = table[: x.shape[1] if x.ndim == 4 else x.shape[0]]
    else:
        at = jnp.asarray(positions)
        if at.dtype.itemsize < 4:  # may not hold the number of rows
            at = at.astype(jnp.int32)
        inside = (at >= 0) & (at < table.shape[0])
        rows = table[jnp.where(inside, at, 0)]
        rows = jnp.where(inside[..., None], rows, jnp.nan)
    return rows if x.ndim == 2 else rows[..., None, :]
