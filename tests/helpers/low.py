"""`low`: the result of plain attention computed in the dtype itself.

Every matrix is materialised. Matmuls accumulate in float32 (float64 for
float64), the softmax is float32, and what plain code would store in the dtype
is rounded to it: P, dP, dS and the results. Masks and score modifications are
given as `options.Terms`. The distance to the float64 reference is the error
of any computation in the dtype; cuflash's error may be a small multiple of it
(CONTRIBUTING, "Error").
"""

from cuflash.reference.scores import reduce_to_shape

from .dtypes import lse_dtype
from .heads import heads_first, heads_last, sum_groups


def forward(q, k, v, terms, *, scale):
    """Return out in the dtype of q; all in the public layout."""
    dtype, wide, heads = q.dtype, lse_dtype(q.dtype), q.shape[2]
    q, k, v = (heads_first(x, heads).astype(wide) for x in (q, k, v))
    s = terms.score((q @ k.swapaxes(-1, -2)) * wide.type(scale))
    p, _ = terms.softmax(s)
    p = (p * terms.z).astype(dtype).astype(wide)
    return heads_last(p @ v).astype(dtype)


def backward(dout, q, k, v, terms, *, scale, bias=None, dlse=None):
    """Return dq, dk, dv in the dtype of q; all in the public layout.

    Then dbias in the dtype of bias, and dsink in that of lse.
    """
    dtype, wide = q.dtype, lse_dtype(q.dtype)
    heads, heads_kv = q.shape[2], k.shape[2]
    dout, q, k, v = (
        heads_first(x, heads).astype(wide) for x in (dout, q, k, v)
    )

    def stored(x):
        return x.astype(dtype).astype(wide)

    products = (q @ k.swapaxes(-1, -2)) * wide.type(scale)
    p, p_sink = terms.softmax(terms.score(products))
    kept = stored(p * terms.z)
    p = stored(p)
    dp = stored(dout @ v.swapaxes(-1, -2)) * terms.z
    delta = (p * dp).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta -= dlse[..., None]
    ds_bias = stored(p * (dp - delta))
    ds = stored(ds_bias * terms.slope(products))
    scale = wide.type(scale)
    dq = scale * (ds @ k)
    dk = scale * sum_groups(ds.swapaxes(-1, -2) @ q, heads_kv)
    dv = sum_groups(kept.swapaxes(-1, -2) @ dout, heads_kv)
    gradients = [heads_last(x).astype(dtype) for x in (dq, dk, dv)]
    if bias is not None:
        dbias = reduce_to_shape(ds_bias, bias.shape)
        gradients.append(dbias.astype(bias.dtype))
    if terms.sink is not None:
        gradients.append(-(p_sink * delta).sum(axis=(0, 2, 3)).astype(wide))
    return tuple(gradients)
