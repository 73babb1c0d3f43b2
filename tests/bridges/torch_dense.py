"""Attention by torch's own operations, which torch differentiates."""

import torch


def dense(q, k, v, bias=None, sink=None, softcap=None, causal=False):
    """Return out; q may have more heads than k and v."""
    q, k, v = (x.movedim(-2, -3) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
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
    weights = torch.softmax(scores, -1)[..., :keys]
    return (weights @ v).movedim(-3, -2)
