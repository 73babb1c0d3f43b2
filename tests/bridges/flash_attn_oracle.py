"""Attention as flash-attn's README describes it: dense, float64, autograd.

Written from that description alone; a mask is the condition on (i, j) that it
states, asked of each pair.

Tolerances. Write u for float64's unit 2^-53, S for the largest score, n for
the most keys and d for the columns of a head. To first order

    a score of d terms, then at most 8 operations    (d + 8) u S
    a probability, relative: two scores (s - lse),
    the sum of n terms, exp and a division           2 (d + 8) u S + (n + 8) u
    out, a sum of n terms                            that + n u, times max|v|

and a gradient comes from three such stages, one after another: P, dS and the
sum over tokens. The oracle errs as much, so a difference may be twice that.
"""

import math

import torch

UNIT = 2.0**-53


def sees(i, j, seqlen_q, seqlen_k, causal, window):
    """Whether query i sees key j."""
    here = i + seqlen_k - seqlen_q
    left, right = window
    return not (
        (causal and j > here)
        or (left >= 0 and j < here - left)
        or (right >= 0 and j > here + right)
    )


def mask(seqlen_q, seqlen_k, causal=False, window=(-1, -1)):
    """The pairs that are visible, (seqlen_q, seqlen_k)."""
    rows = [
        [
            sees(i, j, seqlen_q, seqlen_k, causal, window)
            for j in range(seqlen_k)
        ]
        for i in range(seqlen_q)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(seqlen_q, seqlen_k)


def sequence(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
):
    """Out (seqlen_q, nheads, headdim) and lse (nheads, seqlen_q)."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = softmax_scale or 1 / math.sqrt(q.shape[-1])
    scores = scale * torch.einsum("ihd,jhd->hij", q, k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        distance = (i - torch.arange(k.shape[0])).abs()
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    visible = mask(q.shape[0], k.shape[0], causal, window_size)
    some = visible.any(-1)
    # Rows that see no key keep finite scores: autograd makes NaN of others.
    scores = scores.masked_fill(~visible & some[:, None], -math.inf)
    if not k.shape[0]:
        lse = scores.new_full(scores.shape[:-1], -math.inf)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse
    weights = torch.softmax(scores, -1) * some[:, None]
    lse = torch.logsumexp(scores, -1).masked_fill(~some, -math.inf)
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def dense(q, k, v, alibi_slopes=None, **options):
    """Out (batch, seqlen_q, nheads, headdim) and lse, of each sequence."""
    each = [
        sequence(*x, alibi_slopes=slopes_of(alibi_slopes, b), **options)
        for b, x in enumerate(zip(q, k, v, strict=True))
    ]
    outs, lses = zip(*each, strict=True)
    return torch.stack(outs), torch.stack(lses)


def packed(q, k, v, seqlens_q, seqlens_k, alibi_slopes=None, **options):
    """Out (total_q, nheads, headdim), lse (nheads, total_q)."""
    parts = zip(
        q.split(seqlens_q), k.split(seqlens_k), v.split(seqlens_k), strict=True
    )
    each = [
        sequence(*x, alibi_slopes=slopes_of(alibi_slopes, b), **options)
        for b, x in enumerate(parts)
    ]
    outs, lses = zip(*each, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1)


def slopes_of(slopes, sequence):
    """The slopes of one sequence."""
    return slopes if slopes is None or slopes.ndim == 1 else slopes[sequence]


def rotated(x, cos, sin, first, interleaved):
    """x (seqlen, nheads, headdim), its tokens at first, first + 1, ..."""
    out = x.double().clone()
    pairs = cos.shape[1]
    for m, i in ((m, i) for m in range(len(x)) for i in range(pairs)):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        c, s = cos[first + m, i].double(), sin[first + m, i].double()
        out[m, :, a] = x[m, :, a].double() * c - x[m, :, b].double() * s
        out[m, :, b] = x[m, :, a].double() * s + x[m, :, b].double() * c
    return out


def tolerance(q, k, v, added=0.0):
    """How far out and lse may be off; `added` bounds slopes times distance."""
    return 2 * UNIT * _roundings(q, k, added) * _size(v)


def tolerance_of_gradients(q, k, v, dout, added=0.0):
    """A gradient sums, over tokens, products of sums over columns."""
    terms = max(q.shape[-3], k.shape[-3]) * q.shape[-1]
    sizes = math.prod(map(_size, (q, k, v, dout)))
    return 6 * UNIT * _roundings(q, k, added) * sizes * terms


def _size(x):
    return max(1.0, x.detach().abs().max().item())


def _roundings(q, k, added):
    head_dim, keys = q.shape[-1], k.shape[-3]
    norms = [x.detach().norm(dim=-1).max().item() for x in (q, k)]
    largest = math.prod(norms) + added
    return 2 * (head_dim + 8) * largest + 2 * keys + 8
