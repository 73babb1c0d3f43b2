"""Scores and masks as programs for FlexAttention write them, and dense calls.

Names of tensors that a case reads are its own; `BATCH`, `HEADS` and `SEQLEN`
are those of its calls.
"""

import torch

BATCH, HEADS, SEQLEN = 2, 4, 33
_IDS = torch.tensor([0] * 10 + [1] * 3 + [2] * 20)
_STARTS = torch.tensor([0, 10, 13, 33])
_PREFIX = torch.tensor([5, 17])
_TEMPERATURE = torch.tensor(1.5)
_SPANS = torch.tensor([[0, 7], [3, 20], [20, 33]])
_CHOSEN = torch.tensor(1)


def _leaf(*shape):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.cos(numbers).reshape(shape).requires_grad_()


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _window(size):
    return lambda b, h, i, j: (i - j).abs() <= size


def _dilated(size, step):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % step == 0)

    return mask


def _both(*masks):
    """As torch's and_masks."""

    def mask(b, h, q_idx, kv_idx):
        found = b.new_ones((), dtype=torch.bool)
        for one in masks:
            found = found & one(b, h, q_idx, kv_idx)
        return found

    return mask


def _in_documents(inner):
    def mask(b, h, q_idx, kv_idx):
        mine, other = _IDS[q_idx], _IDS[kv_idx]
        pair = q_idx - _STARTS[mine], kv_idx - _STARTS[other]
        return (mine == other) & inner(b, h, *pair)

    return mask


def _prefix(b, h, q_idx, kv_idx):
    return (kv_idx < _PREFIX[b]) | causal(b, h, q_idx, kv_idx)


def _neighbours(width, height, size):
    def places(index):
        return index // width, index % width

    def mask(b, h, q_idx, kv_idx):
        (y, x), (row, column) = places(q_idx), places(kv_idx)
        y = y.clamp(size, height - 1 - size)
        x = x.clamp(min=size, max=width - 1 - size)
        return ((y - row).abs() <= size) & ((x - column).abs() <= size)

    return mask


def _transfusion(spans):
    def mask(b, h, q_idx, kv_idx):
        seen = q_idx >= kv_idx
        for of_batch, first, length in spans:
            inside = (q_idx >= first) & (kv_idx < first + length)
            seen = seen | ((b == of_batch) & inside)
        return seen

    return mask


def _images(b, h, q_idx, kv_idx):
    first, last = _SPANS[_IDS[kv_idx]]
    return (q_idx >= first) & (q_idx < last)


MASKS = {
    "causal": causal,
    "window": _both(causal, _window(4)),
    "dilated": _dilated(9, 3),
    "documents": _in_documents(causal),
    "prefix": _prefix,
    "neighbours": _neighbours(6, 6, 1),
    "transfusion": _transfusion([(0, 3, 9), (1, 20, 5)]),
    "images": _images,
    "nothing": lambda b, h, i, j: b.new_ones(size=(), dtype=torch.bool),
}


def _alibi(heads):
    def score(s, b, h, q_idx, kv_idx):
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return s + (kv_idx - q_idx) * slope

    return score


def _softcap(cap):
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap)


def _relative():
    table = _leaf(HEADS, 2 * SEQLEN)

    def score(s, b, h, q_idx, kv_idx):
        return s + table[h, q_idx - kv_idx + SEQLEN]

    return score, [table]


def _t5():
    weights = _leaf(HEADS, 32)

    def score(s, b, h, q_idx, kv_idx):
        distance = torch.clamp(q_idx - kv_idx, min=0)
        ratio = torch.log(distance.clamp(min=1) / 8.0) / 2
        far = torch.clamp(8 + (ratio * 8).to(torch.int64), max=31)
        return s + weights[h, torch.where(distance < 8, distance, far)]

    return score, [weights]


def _weird():
    bias = _leaf(BATCH, HEADS, 3, SEQLEN)
    return lambda s, b, h, i, j: s + bias[b, h, _CHOSEN, i], [bias]


def _scaled():
    gain = torch.tensor(0.7, dtype=torch.float64).requires_grad_()
    return lambda s, b, h, i, j: gain * s / _TEMPERATURE, [gain]


def _hidden(s, b, h, q_idx, kv_idx):
    least = torch.tensor(-float("inf"))
    return torch.where(q_idx >= kv_idx, s, least)


def _bilinear():
    rows, columns = _leaf(HEADS, SEQLEN), _leaf(SEQLEN)
    return lambda s, b, h, i, j: s + rows[h, i] * columns[j], [rows, columns]


SCORES = {
    "alibi": lambda: (_alibi(HEADS), []),
    "softcap": lambda: (_softcap(2.0), []),
    "relative": _relative,
    "t5": _t5,
    "weird": _weird,
    "scaled": _scaled,
    "hidden": lambda: (_hidden, []),
    "bilinear": _bilinear,
}


def inputs(dtype=torch.float64, seqlen=SEQLEN):
    """Return query, key, value; out are the weights, as value is coded.

    One row of scores in three has a peak, one in three is uniform.
    """
    generator = torch.Generator().manual_seed(0)
    shape = 2, BATCH, HEADS, seqlen, 8
    query, key = torch.randn(shape, generator=generator, dtype=dtype)
    query[:, :, ::3] *= 4
    query[:, :, 1::3] = 0
    value = torch.eye(seqlen, dtype=dtype).expand(BATCH, HEADS, -1, -1)
    return [x.clone().requires_grad_() for x in (query, key, value)]


def dense(query, key, value, score=None, mask=None):
    """Return out by a matrix of scores, which torch differentiates."""
    axes = BATCH, HEADS, query.shape[2], key.shape[2]
    indices = torch.meshgrid(*map(torch.arange, axes), indexing="ij")
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if score is not None:
        scores = score(scores, *indices)
    if mask is not None:
        scores = scores.masked_fill(~mask(*indices), -float("inf"))
    return torch.softmax(scores, -1) @ value
