"""Masks and scores drawn from a seed: functions of traced values or arrays.

They read the arrays of `arrays`, at indices that leave them too.
"""

import random
from dataclasses import dataclass

import numpy as np

NUMBERS = {"count": 3, "ratio": 0.75}


def arrays(seed=0):
    """Return arrays of each kind; `odd` has infinities and a NaN."""
    rng = np.random.default_rng(seed)
    return {
        "flags": rng.random(20) < 0.5,
        "ids": rng.integers(-3, 4, (2, 40)),
        "odd": np.array([1, np.nan, 3, np.inf, -np.inf, 2, 2, 2], np.float32),
        "places": rng.integers(0, 5, (7, 9)).astype(np.int16),
        "table": rng.standard_normal(50).astype(np.float32),
    }


@dataclass
class _Draw:
    """Expressions of the values that a function has, from random choices."""

    choices: random.Random
    ints: list
    reals: list
    given: dict

    def one(self, *makers):
        return self.choices.choice(makers)()

    def int(self, depth):
        if depth == 0:
            if self.choices.random() < 0.2:
                return self.choices.randint(-5, 40)
            return self.choices.choice(self.ints)

        def x():
            return self.int(depth - 1)

        def divisor():
            return self.one(lambda: self.choices.choice([1, 2, 3, -2, 7]), x)

        ids, places = self.given["ids"], self.given["places"]
        return self.one(
            lambda: x() + x(),
            lambda: x() - x(),
            lambda: x() - x(),
            lambda: x() * x(),
            lambda: x() // divisor(),
            lambda: x() % divisor(),
            lambda: np.where(self.bool(depth - 1), x(), x()),
            lambda: np.minimum(x(), x()),
            lambda: np.maximum(x(), x()),
            lambda: np.abs(x()),
            lambda: np.sign(x()) - x(),
            lambda: x() >> self.choices.randint(0, 3),
            lambda: x() << 2,
            lambda: x() & x(),
            lambda: ids[self.ints[0], x()],
            lambda: places[x(), x()],
        )

    def real(self, depth):
        if depth == 0:
            table, odd = self.given["table"], self.given["odd"]
            return self.one(
                lambda: self.choices.choice(self.reals),
                lambda: self.choices.choice(self.reals),
                lambda: self.choices.choice([0.5, -1.25, 3.0]),
                lambda: self.choices.choice(self.ints) * 0.5,
                lambda: table[self.choices.choice(self.ints)],
                *([lambda: odd[self.int(0)]] if "q" in self.given else []),
            )

        def x():
            return self.real(depth - 1)

        return self.one(
            lambda: x() + x(),
            lambda: x() - x(),
            lambda: x() * x(),
            lambda: x() / (np.abs(x()) + 0.5),
            lambda: np.abs(x()),
            lambda: np.minimum(x(), x()),
            lambda: np.maximum(x(), x()),
            lambda: np.floor(x()),
            lambda: np.tanh(x()),
            lambda: np.exp(-np.abs(x())),
            lambda: np.where(self.bool(depth - 1), x(), x()),
        )

    def bool(self, depth):
        if depth == 0:
            flags = self.given["flags"]
            query, key = self.ints[2:4]
            return self.one(lambda: query >= key, lambda: flags[self.int(0)])

        def x():
            return self.bool(depth - 1)

        def compared(function):
            of = self.choices.choice([self.int, self.real])
            return function(of(depth - 1), of(depth - 1))

        return self.one(
            lambda: compared(np.less),
            lambda: compared(np.less_equal),
            lambda: compared(np.greater),
            lambda: compared(np.greater_equal),
            lambda: compared(np.equal),
            lambda: compared(np.not_equal),
            lambda: x() & x(),
            lambda: x() | x(),
            lambda: np.logical_not(x()),
        )


def _draw(seed, indices, lengths, given, *scores):
    choices = random.Random(seed)
    count, ratio = given["count"], given["ratio"]
    ints = [*indices, *indices[2:], *lengths, count]
    return _Draw(choices, ints, [ratio, *scores, *scores], given)


def mask(seed):
    """Return a mask_mod, of a depth from 1 to 4."""

    def drawn(b, h, q, k, *, seqlen_q, seqlen_k, **given):
        given["q"] = q  # `odd` may be read
        draw = _draw(seed, (b, h, q, k), (seqlen_q, seqlen_k), given)
        return draw.bool(1 + seed % 4)

    return drawn


def score(seed):
    """Return a score_mod: the score, and a tame function of it."""

    def drawn(score, b, h, q, k, *, seqlen_q, seqlen_k, **given):
        lengths = seqlen_q, seqlen_k
        draw = _draw(seed, (b, h, q, k), lengths, given, score)
        x = draw.real(1 + seed % 4)
        return score + 2 * np.tanh(x)

    return drawn
