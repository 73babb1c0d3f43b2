"""Attention by torch's own operations, which torch differentiates."""

import torch


def dense(q, k, v, bias=None, sink=None, softcap=None, causal=False):
    """Return out; q may have more heads than k and v."""
    weights = weights_of(q, k, bias, sink, softcap, causal)
    v = v.movedim(-2, -3)
    v = v.repeat_interleave(q.shape[-2] // v.shape[-3], -3)
    return (weights @ v).movedim(-3, -2)


def weights_of(
    q, k, bias=None, sink=None, softcap=None, causal=False, scale=None
):
    """Return the matrix, (batch, heads, seqlen_q, seqlen_k)."""
    q, k = (x.movedim(-2, -3) for x in (q, k))
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    rows, keys = scores.shape[-2:]
    if causal:
        visible = torch.ones(rows, keys, dtype=bool).tril(keys - rows)
        scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1)[..., :keys]
