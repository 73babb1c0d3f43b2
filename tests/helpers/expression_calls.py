"""Arrays and numbers for drawn functions, and what NumPy makes of them."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import assume

from cuflash.errors import ExpressionError
from cuflash.expressions import derivative, nodes
from cuflash.expressions.trace import ArrayKind, Given, record
from expression_strategies import ARRAYS, LENGTHS, NUMBERS
from helpers.expression_rounding import Bounded, bounded

BATCH, HEADS = 2, 3


def mod_arrays(seed, dtype=np.float32):
    """Return the arrays and numbers of `expression_strategies`.

    Reals are multiples of 1/8. Some have strides of their own; `far` has ints
    of 64 bits, `small` of 8. Axes are shorter than sequences.
    """
    rng = np.random.default_rng(seed)

    def reals(*shape):
        return rng.integers(-24, 24, shape) / 8

    far = rng.choice([-(2**63), 2**63 - 1, 2**40, -1, 0, 3, 17], 20)
    return {
        "table": reals(9, HEADS).T.astype(dtype),  # transposed
        "curve": reals(30).astype(np.float64)[::-2],
        "half": reals(25).astype(np.float16),
        "ids": np.sort(rng.integers(0, 4, (BATCH, 28))).astype(np.int32),
        "small": rng.integers(-128, 128, 17).astype(np.int8),
        "far": far.astype(np.int64),
        "flags": rng.random(26) < 0.5,
        "pairs": rng.random((12, 14)) < 0.6,
        "n": int(rng.integers(-3, 20)),
        "w": float(rng.integers(-16, 16) / 8),
        "on": bool(rng.integers(2)),
    }


def given_of(values):
    """Return what functions are recorded with, and the arrays by slot."""
    arrays = {name: values[name] for name in sorted(ARRAYS)}
    kinds = tuple(
        (name, ArrayKind(
            x.dtype.name, x.ndim,
            (x.ndim - 1,) if x.strides[-1] == x.itemsize else (),
        )) for name, x in arrays.items()
    )  # fmt: skip
    numbers = tuple((name, NUMBERS[name]) for name in sorted(NUMBERS))
    return Given(kinds, numbers), [*arrays.values()], [
        values[name] for name in sorted(NUMBERS)
    ]  # fmt: skip


def recorded(drawn, values):
    """Return the graph of a drawn function."""
    with np.errstate(all="ignore"):  # of constants, which NumPy computes
        try:
            return record(drawn.function, drawn.role, given_of(values)[0])[0]
        except ExpressionError as error:
            # Python's own numbers: 1.0 / 0.0 raises before anything is traced.
            assume(not isinstance(error.__cause__, ZeroDivisionError))
            raise


@dataclass(frozen=True)
class Pairs:
    """The pairs of one head, and the scores that come in.

    score : (queries, keys), in the dtype that scores have.
    """

    b: int
    h: int
    queries: int
    keys: int
    score: np.ndarray

    @classmethod
    def drawn(cls, seed, queries, keys, real):
        rng = np.random.default_rng(seed)
        b, h = int(rng.integers(BATCH)), int(rng.integers(HEADS))
        score = rng.integers(-64, 64, (queries, keys)) / 16
        return cls(b, h, queries, keys, score.astype(real))

    def indices(self):
        """Return b, h, q_idx and kv_idx, and the lengths."""
        query = np.arange(self.queries, dtype=np.int64)[:, None]
        key = np.arange(self.keys, dtype=np.int64)
        numbers = self.b, self.h, query, key, self.queries, self.keys
        return [np.asarray(x, np.int64) for x in numbers]

    def leaves(self):
        """Return the values of a graph's leaves."""
        names = (*nodes.INDICES, *nodes.LENGTHS)
        found = dict(zip(map(nodes.index, names), self.indices(), strict=True))
        return found | {nodes.SCORE: self.score}

    def full(self, value):
        return np.broadcast_to(value, (self.queries, self.keys))

    def bounded(self, node, given, arithmetic):
        """Return a graph's values, errors and doubts, of all pairs."""
        found = bounded(node, self.leaves(), *given, arithmetic)
        return Bounded(*map(self.full, found))

    def in_double(self):
        return replace(self, score=self.score.astype(np.float64))


def gradient_sums(score, slot, terms, pairs, given, arithmetic):
    """Return the sums of an array's gradient, their errors, and doubts.

    Parameters
    ----------
    score : Node
    slot : int
    terms : ndarray, (queries, keys)
        The gradient of the score that comes out.
    pairs : Pairs
    given : tuple
        Arrays and numbers, by slot.
    arithmetic : expression_rounding.Arithmetic
    """
    array = given[0][slot]
    sums, errors, doubts = (np.zeros(array.shape) for _ in range(3))
    for gather, by in derivative.of_gathers(score, (slot,)).items():
        index = [
            bounded(x, pairs.leaves(), *given, arithmetic) for x in gather.args
        ]
        factor = bounded(by, pairs.leaves(), *given, arithmetic)
        places, inside = [], np.ones(terms.shape, bool)
        for x, size in zip(index, array.shape, strict=True):
            inside = inside & (x.value >= -size) & (x.value < size)
            places.append(pairs.full(x.value))
        at = tuple(x[inside] for x in places)
        with np.errstate(all="ignore"):
            moved = np.where(terms == 0, 0, factor.value * terms)
        doubt = pairs.full(factor.doubt)
        for x in index:
            doubt = doubt | x.doubt
        if (doubt & ~inside).any() or any(x.doubt.any() for x in index):
            doubts += 1  # it may be added anywhere
        with np.errstate(all="ignore"):
            np.add.at(sums, at, pairs.full(moved)[inside])
        np.add.at(doubts, at, pairs.full(doubt)[inside])
        # Each of so many additions rounds; and so does the product.
        size = np.abs(moved) * arithmetic.unit * (terms.size + 2)
        error = factor.error * np.abs(terms) * 1.01 + size
        np.add.at(errors, at, pairs.full(error)[inside])
    odd = ~np.isfinite(sums) | ~np.isfinite(errors)
    return Bounded(sums, 2 * errors + arithmetic.tiny, (doubts > 0) | odd)


class Reading:
    """An array as users' functions read it: 0 outside, ends from -1 on."""

    def __init__(self, array):
        self.array = array
        self.shape = tuple(np.int64(x) for x in array.shape)

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        key = np.broadcast_arrays(*map(np.asarray, key))
        found = np.zeros(key[0].shape, self.array.dtype)
        inside = np.ones(key[0].shape, bool)
        for x, size in zip(key, self.array.shape, strict=True):
            inside &= (x >= -size) & (x < size)
        found[inside] = self.array[tuple(x[inside] for x in key)]
        kind = {"f": np.float64, "b": bool}.get(found.dtype.kind, np.int64)
        return found.astype(kind)


def plain(drawn, values, pairs):
    """Return what the function makes of NumPy arrays, in float64."""
    *indices, seqlen_q, seqlen_k = pairs.in_double().indices()
    if drawn.role == "score_mod":
        indices = [pairs.score.astype(np.float64), *indices]
    named = {
        name: Reading(x) if name in ARRAYS else np.asarray(x)
        for name, x in values.items()
    }
    lengths = dict(zip(LENGTHS, (seqlen_q, seqlen_k), strict=True))
    with np.errstate(all="ignore"):
        return pairs.full(drawn.function(*indices, **lengths, **named))
