"""Speculative decoding: trees of drafts, all checked by one pass.

A table of n-grams guesses how a text goes on, with several guesses where it
is unsure: a tree, whose root is the last character of the text. One pass of
the model reads all nodes; in attention each sees the text and its ancestors,
by a mask of cuflash's `mask_mod`. Then the model's own characters are chosen,
from the root on, for as long as the chosen one is a child in the tree. So the
text is the one that the model writes alone, in fewer passes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from .generation import extend
from .model import to_numpy


class Ngrams:
    """Which characters follow up to `order` others, and how often."""

    def __init__(self, tokens, order=6, branches=2):
        self.order, self.followers = order, {}
        text = list(map(int, tokens))
        for length in range(1, order + 1):
            counts = defaultdict(Counter)
            for stop in range(length, len(text)):
                counts[tuple(text[stop - length : stop])][text[stop]] += 1
            for context, found in counts.items():
                total = found.total()
                self.followers[context] = [
                    (count / total, token)
                    for token, count in found.most_common(branches)
                ]

    def after(self, text):
        """(share, token) of the likeliest, by the longest known context."""
        for length in range(min(self.order, len(text)), 0, -1):
            found = self.followers.get(tuple(text[-length:]))
            if found is not None:
                return found
        return []


@dataclass(frozen=True)
class Tree:
    """Nodes, parents first; the root is node 0."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def child(self, node, token):
        """The child of a node that holds a token, or None."""
        for i, parent in enumerate(self.parents):
            if parent == node and self.tokens[i] == token:
                return i
        return None

    def is_ancestor(self):
        """[i, j]: whether node j is node i or above it."""
        found = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found


def grow(ngrams, text, size, depth):
    """The likeliest `size` nodes after a text, its last character the root.

    None is deeper than `depth`; the root's is 0.
    """
    tree = Tree([], [], [])
    # The negative probability; then the order of arrival, which is unique.
    waiting = [(-1.0, 0, text[-1], -1, 0, text[:-1])]
    arrivals = 1
    while waiting and len(tree.tokens) < size:
        share, _, token, parent, level, before = heapq.heappop(waiting)
        node, path = len(tree.tokens), [*before[-ngrams.order :], token]
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(level)
        if level == depth:
            continue
        for chance, child in ngrams.after(path):
            entry = share * chance, arrivals, child, node, level + 1, path
            heapq.heappush(waiting, entry)
            arrivals += 1
    return tree


def generate(model, prompt, count, choose, cache, ngrams, size=8):
    """Continue `prompt` by `count` tokens, as `generation.generate` does.

    Parameters
    ----------
    prompt : list of int
    choose : callable
        Returns the next token, given the logits (V,) as a NumPy array.
    cache : Cache
        An empty one, with room for `size` tokens more than the text has.
    ngrams : Ngrams
    size : int, optional
        Nodes of a tree, with its root.

    Returns
    -------
    tokens : list of int
        Without the prompt.
    logits : array, (count, V)
        By which each was chosen.
    passes : int
        Of the model, over a prompt or a tree.
    """
    text, rows, passes = list(prompt), [], 0
    if len(prompt) > 1:
        extend(model, model.xp.asarray([prompt[:-1]]), cache)
        passes += 1
    while len(rows) < count:
        depth = min(count - len(rows), model.config.seqlen - len(text))
        tree = grow(ngrams, text, size, max(depth - 1, 0))
        tokens = model.xp.asarray([tree.tokens])
        logits = to_numpy(extend(model, tokens, cache, tree)[0])
        passes += 1
        kept = []
        node = 0
        while node is not None and len(rows) < count:
            kept.append(node)
            rows.append(logits[node])
            text.append(choose(rows[-1]))
            node = tree.child(node, text[-1])
        cache.keep(kept)
    return text[len(prompt) :], np.array(rows), passes
