"""Masks and score modifications of a case, and their dense equivalents.

A deliberate second implementation of docs/guide/options.md. Arrays broadcast
to the public layout (batch, heads, seqlen_q, seqlen_k).
"""

from dataclasses import dataclass

import numpy as np

from cuflash.reference.dropout import Dropout

from .dtypes import DTYPES, lse_dtype


def lse_type(case):
    return lse_dtype(DTYPES[case.dtype])


def _slopes(rng, case):
    """The slopes of 8 heads, 2^-1 to 2^-8."""
    return 2.0 ** -rng.integers(1, 9, case.num_heads_q).astype(np.float32)


def _slopes_of_batches(rng, case):
    shape = (case.batch, case.num_heads_q)
    return 2.0 ** -rng.integers(1, 9, shape).astype(np.float32)


def _bias(rng, case):
    shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    # Any axis may be left to broadcasting.
    shape = tuple(n if rng.random() < 0.6 else 1 for n in shape)
    return rng.standard_normal(shape).astype(DTYPES[case.dtype])


def _mask(rng, case):
    shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    shape = tuple(n if rng.random() < 0.6 else 1 for n in shape)
    return rng.random(shape) < 0.8


def _sink(rng, case):
    sink = rng.standard_normal(case.num_heads_q) * 2
    return sink.astype(lse_type(case))


def _ids(seqlen):
    def make(rng, case):
        """Return ids of consecutive documents, sometimes unsorted."""
        ids = rng.integers(0, 4, (case.batch, getattr(case, seqlen)))
        if rng.random() < 0.8:
            ids.sort(axis=1)
        return ids.astype(np.int32)

    return make


MAKERS = {
    "alibi_slopes": _slopes,
    "alibi_slopes_of_batches": _slopes_of_batches,
    "bias": _bias,
    "mask": _mask,
    "sink": _sink,
    "segment_ids_q": _ids("seqlen_q"),
    "segment_ids_k": _ids("seqlen_k"),
}


def fields_of(names):
    """Return the fields of a case that has the named options."""
    given = {"window": (40, 30), "softcap": 5.0, "dropout": 0.25}
    arrays = {name for name in names if name in MAKERS}
    if "segment_ids_q" in arrays:
        arrays.add("segment_ids_k")
    numbers = {name: x for name, x in given.items() if name in names}
    return {**numbers, "arrays_of": tuple(sorted(arrays))}


def option_arrays(case):
    """Return a case's option arrays by argument name."""
    made = {}
    for number, (name, make) in enumerate(MAKERS.items()):
        if name in case.arrays_of:
            rng = np.random.default_rng([case.seed, number])
            made[name.removesuffix("_of_batches")] = make(rng, case)
    return made


@dataclass(frozen=True)
class Terms:
    """The effect of a call's options on its pairs.

    see : which query sees which key.
    added : to scores, in float64.
    softcap : or None.
    sink : (heads, 1, 1), or None.
    z : factors of dropout, or 1.0.
    """

    see: np.ndarray
    added: np.ndarray
    softcap: float | None
    sink: np.ndarray | None
    z: np.ndarray | float

    def score(self, s):
        """Return scores from scaled QK^T, in its dtype; -inf where masked."""
        if self.softcap is not None:
            s = s.dtype.type(self.softcap) * np.tanh(s / self.softcap)
        s = s + self.added.astype(s.dtype)
        return np.where(self.see, s, s.dtype.type(-np.inf))

    def slope(self, s):
        """Return the derivative of `score` with respect to scaled QK^T."""
        if self.softcap is None:
            return s.dtype.type(1)
        return 1 - np.tanh(s / self.softcap) ** 2

    def softmax(self, s):
        """Return the weights of scores, and the sink's, (..., rows, 1)."""
        sink = -np.inf if self.sink is None else self.sink
        sink = np.broadcast_to(sink, (*s.shape[:-1], 1)).astype(s.dtype)
        m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        m = np.where(m == -np.inf, s.dtype.type(0), m)
        p, of_sink = np.exp(s - m), np.exp(sink - m)
        total = p.sum(axis=-1, keepdims=True) + of_sink
        total = np.where(total == 0, s.dtype.type(1), total)
        return p / total, of_sink / total


def terms_of(q, k, *, causal=False, window=None, **options):
    """Return the terms of a call's options, by their public names."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    past = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    past = past - np.arange(seqlen_k)  # how far the key is before the query
    left, right = window or (None, None)
    see = (past >= 0) | (not causal)
    see &= left is None or past <= left
    see &= right is None or -past <= right
    see = see & options.get("mask", True)
    if "segment_ids_q" in options:
        of_q, of_k = options["segment_ids_q"], options["segment_ids_k"]
        see = see & (of_q[:, None, :, None] == of_k[:, None, None, :])
    added = np.asarray(options.get("bias", 0.0), np.float64)
    if "alibi_slopes" in options:
        slopes = np.asarray(options["alibi_slopes"], np.float64)
        added = added - slopes[..., None, None] * abs(past)
    sink = options.get("sink")
    return Terms(
        see,
        added,
        options.get("softcap"),
        None if sink is None else np.float64(sink)[:, None, None],
        _factors(q, k, options),
    )


def _factors(q, k, options):
    dropout = reference_dropout(q, options)
    if dropout is None:
        return 1.0
    return dropout.factors(np.arange(q.shape[1]), np.arange(k.shape[1]))


def reference_dropout(q, options):
    if not options.get("dropout"):
        return None
    batch, _, heads, _ = q.shape
    first = options.get("first_batch", 0)
    numbers = first + np.arange(batch)[:, None], np.arange(heads)
    return Dropout(options["dropout"], options["seed"], *numbers)


def of_reference(q, options):
    """Return options for the reference, with axes (batch, heads)."""
    other = "dropout", "seed", "first_batch"
    taken = {name: x for name, x in options.items() if name not in other}
    for name in ("segment_ids_q", "segment_ids_k"):
        if name in taken:
            taken[name] = taken[name][:, None]
    if taken.get("window", "") is None:
        del taken["window"]
    return {**taken, "dropout": reference_dropout(q, options)}
