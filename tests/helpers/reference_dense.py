"""Dense attention and its gradient in NumPy, of any real or complex dtype.

A second implementation, for the tests of the reference. Complex steps and
central differences move its inputs: all of it is analytic, but the maximum
that is subtracted from scores, which cancels.
"""

import numpy as np

from cuflash.reference.scores import reduce_to_shape


def dense_products(case, q, k):
    """Return scale * QK^T.

    Not by np.einsum: NumPy 2.4's writes past arrays of clongdouble.
    """
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return scale * (q @ k.swapaxes(-1, -2))


def dense_scores(case, q, k, moved=None):
    """Return scores by their definition.

    moved : options that replace those of the case.
    """
    o = case.meaning() | (moved or {})
    s = dense_products(case, q, k)
    if case.softcap is not None:
        s = case.softcap * np.tanh(s / case.softcap)
    i, j = np.indices(s.shape[-2:])
    past = i + case.seqlen_k - case.seqlen_q - j  # how far back the key is
    if "alibi_slopes" in o:
        s = s - o["alibi_slopes"][..., None, None] * abs(past)
    if "bias" in o:
        s = s + o["bias"]
    left, right = case.window
    seen = (past >= 0) | (not case.causal)
    seen &= (left is None or past <= left) & (right is None or -past <= right)
    seen = seen & o.get("mask", True)
    if "segment_ids_q" in o:
        ids = (
            o["segment_ids_q"][..., :, None],
            o["segment_ids_k"][..., None, :],
        )
        seen = seen & (ids[0] == ids[1])
    return np.where(seen, s, -np.inf)


def dense_softmax(case, q, k, moved=None):
    """Return P, the sink's weight (..., rows), and lse."""
    s = dense_scores(case, q, k, moved)
    sink = (case.meaning() | (moved or {})).get("sink")
    sink = np.full((), -np.inf) if sink is None else sink
    column = np.broadcast_to(sink[..., None, None], (*s.shape[:-1], 1))
    s = np.concatenate([s, column], axis=-1)
    m = s.real.max(axis=-1, keepdims=True)
    m = np.where(m == -np.inf, 0, m)
    weights = np.where(s.real == -np.inf, 0, np.exp(s - m))
    total = weights.sum(axis=-1, keepdims=True)
    blind = total == 0
    p = weights / np.where(blind, 1, total)
    lse = np.where(blind, -np.inf, m + np.log(np.where(blind, 1, total)))
    return p[..., :-1], p[..., -1], lse[..., 0]


def keep_factors(case):
    """Return Z of every pair, for each leading index."""
    shape = (*case.lead, case.seqlen_q, case.seqlen_k)
    dropout = case.dropped()
    if dropout is None:
        return np.ones(shape)
    i, j = np.arange(case.seqlen_q), np.arange(case.seqlen_k)
    z = np.empty(shape)
    for at in np.ndindex(*case.lead):
        batch, head = (0, 0, *at)[-2:]
        one = dropout._replace(batch=batch, head=head)
        z[at] = one.factors(i, j)
    return z


def dense_attention(case, inputs):
    """Return out and lse; `inputs` has q, k, v, and bias and sink if any."""
    moved = {n: inputs[n] for n in ("bias", "sink") if n in inputs}
    p, _, lse = dense_softmax(case, inputs["q"], inputs["k"], moved)
    return (p * keep_factors(case)) @ inputs["v"], lse


def dense_vjp(case, dout, dlse, inputs):
    """Return the gradient of each input, by name."""
    q, k, v = (inputs[x] for x in "qkv")
    moved = {n: inputs[n] for n in ("bias", "sink") if n in inputs}
    p, p_sink, _ = dense_softmax(case, q, k, moved)
    z = keep_factors(case)
    dp = z * (dout @ v.swapaxes(-1, -2))
    delta = (p * dp).sum(axis=-1) - dlse
    ds = p * (dp - delta[..., None])
    slope = 1
    if case.softcap is not None:
        slope = 1 - np.tanh(dense_products(case, q, k) / case.softcap) ** 2
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    dx = scale * slope * ds
    gradients = {
        "q": dx @ k,
        "k": dx.swapaxes(-1, -2) @ q,
        "v": (z * p).swapaxes(-1, -2) @ dout,
    }
    if "bias" in inputs:
        gradients["bias"] = reduce_to_shape(ds, inputs["bias"].shape)
    if "sink" in inputs:
        of_heads = -(p_sink * delta).sum(axis=-1)
        gradients["sink"] = reduce_to_shape(of_heads, inputs["sink"].shape)
    return gradients
