"""The text that the model of scripts/generate.py learns."""

from __future__ import annotations

import numpy as np


def load_text():
    """The topics that `help()` knows: 450 kB of English and Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise SystemExit(
            "This Python comes without pydoc_data.topics, the text that the "
            "model learns.\nIt is part of the standard library; some small "
            "builds leave it out. Try another Python."
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


class Corpus:
    """A text as numbers. Every tenth paragraph is kept for validation."""

    def __init__(self, text):
        self.vocabulary = sorted(set(text))
        self.number = {c: i for i, c in enumerate(self.vocabulary)}
        paragraphs = text.split("\n\n")
        held_out = paragraphs[9::10]
        del paragraphs[9::10]
        self.train = self.encode("\n\n".join(paragraphs))
        self.validation = self.encode("\n\n".join(held_out))

    def encode(self, text):
        return np.array([self.number[c] for c in text], dtype=np.int32)

    def decode(self, tokens):
        return "".join(self.vocabulary[i] for i in tokens)

    @staticmethod
    def batch(tokens, config, rng):
        """Random pieces (B, T) and, for each character, the one after it."""
        last = len(tokens) - config.seqlen
        starts = rng.integers(last, size=(config.batch, 1))
        pieces = tokens[starts + np.arange(config.seqlen + 1)]
        return pieces[:, :-1], pieces[:, 1:]
