"""Attention by JAX's own operations, which JAX differentiates."""

import jax
import jax.numpy as jnp


def dense(q, k, v, bias=None, sink=None):
    """Return out; q may have more heads than k and v."""
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (jnp.repeat(x, group, -3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    keys = scores.shape[-1]
    if sink is not None:
        shape = (*scores.shape[:-1], 1)
        column = jnp.broadcast_to(sink[:, None, None], shape)
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores, -1)[..., :keys]
    return jnp.moveaxis(weights @ v, -3, -2)
