"""Attention with a bias of pairs, as models of proteins call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cuflash.request import pair_bias

from .attention import attention

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def triangle_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array,
    mask: ArrayLike | None,
    scale: float | None,
    precision: Any = None,
    *,
    deterministic: bool = False,
) -> list[Any]:
    """Attention of each row of a pair representation, with a common bias.

    The signature of cuEquivariance's `triangle_attention` for JAX.
    Differentiable in `q`, `k`, `v` and `bias`, twice and in forward mode.

    Parameters
    ----------
    q : jax.Array, (batch, rows, heads, seqlen_q, head_dim)
        float16, bfloat16, float32 or float64; any head_dim up to 512.
    k, v : jax.Array, (batch, rows, heads, seqlen_k, head_dim)
    bias : jax.Array, (batch, 1, heads, seqlen_q, seqlen_k)
        Added to the scores of all rows, as float32 (float64 for float64).
    mask : jax.Array, (batch, rows, 1, 1, seqlen_k), or None
        Nonzero or True where a key is seen.
    scale : float or None
        Multiplies q k^T; None: head_dim ** -0.5.
    precision : optional
        Ignored: float32 products are computed in float32.
    deterministic : bool, optional
        Whether gradients have the same bits in every run. That of the bias
        is then computed for each row, in rows times the bias's memory.

    Returns
    -------
    list of out, lse, None
        out is like `q`, lse (batch, rows, heads, seqlen_q, 1). The third is
        None: cuEquivariance returns the largest scores there, for its own
        backward pass.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    CuflashError
        In the other cases in which `attention` raises.

    See Also
    --------
    cuflash.torch.triangle_attention : notes on rows without keys.

    Examples
    --------
    >>> import jax
    >>> from cuflash.jax import triangle_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 16, 8))
    >>> bias = jax.random.normal(jax.random.key(1), (1, 1, 4, 16, 16))
    >>> out, lse, _ = triangle_attention(q, k, v, bias, None, None)
    >>> lse.shape
    (1, 16, 4, 16, 1)
    """
    given = {"q": q, "k": k, "v": v, "bias": bias}
    given |= {} if mask is None else {"mask": jnp.asarray(mask)}
    pair_bias.check_triangle({x: tuple(y.shape) for x, y in given.items()})
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    bias = bias.astype(wide)
    if deterministic:
        bias = jnp.broadcast_to(bias, (*q.shape[:2], *bias.shape[2:]))
    seen = None if mask is None else jnp.asarray(mask) != 0

    def of_batch(i: int) -> Any:
        options = {} if seen is None else {"mask": seen[i]}
        return attention(
            *(x[i].swapaxes(1, 2) for x in (q, k, v)), bias=bias[i],
            scale=scale, deterministic=deterministic, return_lse=True,
            **options,
        )  # fmt: skip

    if not q.shape[0]:
        lse = jnp.zeros((*q.shape[:-1], 1), wide)
        return [jnp.zeros(q.shape, q.dtype), lse, None]
    results = [of_batch(i) for i in range(q.shape[0])]
    out = jnp.stack([x.swapaxes(1, 2) for x, _ in results])
    return [out, jnp.stack([x for _, x in results])[..., None], None]


def attention_pair_bias(
    s: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    z: jax.Array,
    mask: ArrayLike | None,
    num_heads: int,
    w_proj_z: jax.Array | None,
    w_proj_g: jax.Array,
    w_proj_o: jax.Array,
    w_ln_z: jax.Array | None = None,
    b_ln_z: jax.Array | None = None,
    b_proj_z: jax.Array | None = None,
    b_proj_g: jax.Array | None = None,
    b_proj_o: jax.Array | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = True,
    is_cached_z_proj: bool = False,
    *,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated attention with a bias projected from a pair representation.

    `cuflash.torch.attention_pair_bias` for JAX arrays: its page has all
    arguments and shapes.

    Parameters
    ----------
    s, q, k, v, z, mask, num_heads
        As there.
    w_proj_z, w_proj_g, w_proj_o, w_ln_z, b_ln_z, b_proj_z, b_proj_g
        As there.
    b_proj_o, inf, eps, attn_scale, return_z_proj, is_cached_z_proj
        As there.
    deterministic : bool, optional
        As for `triangle_attention`.

    Returns
    -------
    out : jax.Array, (batch * multiplicity, seqlen_q, width)
    z_proj : jax.Array, (batch, heads, seqlen_q, seqlen_k), or None
        None without `return_z_proj`.

    Raises
    ------
    ShapeError
        If shapes do not fit.
    CuflashError
        In the other cases in which `attention` raises.

    Examples
    --------
    >>> import jax
    >>> from cuflash.jax import attention_pair_bias
    >>> keys = iter(jax.random.split(jax.random.key(0), 8))
    >>> def normal(*shape):
    ...     return jax.random.normal(next(keys), shape)
    >>> s, z = normal(1, 16, 32), normal(1, 16, 16, 8)
    >>> q, k, v = normal(3, 1, 4, 16, 8)
    >>> weights = normal(4, 8), normal(32, 32), normal(32, 32)
    >>> out, bias = attention_pair_bias(s, q, k, v, z, None, 4, *weights)
    >>> out.shape, bias.shape
    ((1, 16, 32), (1, 4, 16, 16))
    """
    pair_bias.check_projection(w_proj_z, is_cached_z_proj)
    bias = z
    if not is_cached_z_proj:
        bias = _linear(_layer_norm(z, w_ln_z, b_ln_z, eps), w_proj_z, b_proj_z)
        bias = bias.transpose(0, 3, 1, 2)
    seen = None if mask is None else jnp.asarray(mask)
    given = {"q": q, "k": k, "bias": bias}
    given |= {} if seen is None else {"mask": seen}
    shapes = {x: tuple(y.shape) for x, y in given.items()}
    multiplicity = pair_bias.multiplicity_of(shapes, num_heads)
    gated = {"s": s, "w_proj_g": w_proj_g, "w_proj_o": w_proj_o}
    others = {"b_proj_g": b_proj_g, "b_proj_o": b_proj_o}
    gated |= {name: x for name, x in others.items() if x is not None}
    shapes = {x: tuple(y.shape) for x, y in gated.items()}
    pair_bias.check_gate(tuple(q.shape), shapes)
    batch = bias.shape[0]
    if seen is not None:
        if len(seen) != q.shape[0]:
            seen = jnp.repeat(seen, multiplicity, 0)
        seen = seen.reshape(batch, multiplicity, 1, 1, seen.shape[1])
    q_rows, k_rows, v_rows = (
        x.reshape(batch, multiplicity, *x.shape[1:]) for x in (q, k, v)
    )
    out, _, _ = triangle_attention(
        q_rows, k_rows, v_rows, bias[:, None], seen, attn_scale,
        deterministic=deterministic,
    )  # fmt: skip
    out = out.reshape(q.shape[0], *out.shape[2:]).swapaxes(1, 2)
    gate = jax.nn.sigmoid(_linear(s, w_proj_g, b_proj_g))
    out = _linear(gate * out.reshape(gate.shape), w_proj_o, b_proj_o)
    return out, bias if return_z_proj else None


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    y = x @ weight.T
    return y if bias is None else y + bias


def _layer_norm(z: Any, weight: Any, bias: Any, eps: float) -> Any:
    mean, variance = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
    z = (z - mean) * jax.lax.rsqrt(variance + eps)
    z = z if weight is None else z * weight
    return z if bias is None else z + bias
