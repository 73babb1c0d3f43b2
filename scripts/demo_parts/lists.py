"""The lists that the demo learns to put in alphabetical order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .model import to_numpy

WORDS = """
    acorn amber apple arrow badge barn bean birch boat bread brick cloud coal
    coin corn cup daisy dawn desk door drum eagle ember fern field fig flute
    fox gate glass grape hat hill honey ink iris ivy jar kite lake lamp leaf
    lemon map maple mint moon nest oak olive onion pear pine plum rain river
    rope salt shell stone tea torch wheat wolf
""".split()


class Lists:
    """Texts of a list in any order, a colon, and the list in order.

    Attributes
    ----------
    vocabulary : list of str
        The words in alphabetical order, then the colon. A word's number is
        its place here.
    train, validation : array of int
        The words to draw from: all. There are so many lists that one of the
        training hardly ever comes again.
    """

    def __init__(self, words=WORDS):
        self.vocabulary = [*sorted(words), ":"]
        self.train = self.validation = np.arange(len(words))

    def decode(self, tokens):
        return " ".join(self.vocabulary[i] for i in tokens)

    @staticmethod
    def batch(words, config, rng):
        """Random texts (B, T) and, for each word, the one after it.

        A list has T / 2 words. What comes after each of them is chance: -1,
        which counts nothing in the loss.
        """
        length = config.seqlen // 2
        every = np.tile(words, (config.batch, 1))
        lists = rng.permuted(every, axis=1)[:, :length]
        colons = np.full((config.batch, 1), len(words))
        texts = np.concatenate([lists, colons, np.sort(lists)], axis=1)
        targets = texts[:, 1:].copy()
        targets[:, :length] = -1
        return texts[:, :-1], targets


def share_in_order(model, lists, rng, count=256):
    """Return the share of new lists that the model writes without a fault.

    One pass tells: if the likeliest word is the right one after each right
    beginning, the model writes the list alone, too.
    """
    config = replace(model.config, batch=count)
    tokens, targets = lists.batch(lists.validation, config, rng)
    logits, _ = model.forward(model.xp.asarray(tokens))
    words = to_numpy(logits.argmax(axis=-1))
    return ((words == targets) | (targets < 0)).all(axis=-1).mean()
