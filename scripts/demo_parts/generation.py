"""Text from the trained model, with and without a KV cache.

Without a cache, each character costs a pass over the whole text so far. With
one, the keys and values of earlier characters are stored, and a pass sees new
characters only. Both compute the same logits, up to rounding: with a causal
mask, a character's keys and values do not depend on later characters.
"""

from __future__ import annotations

import numpy as np

import cuflash

from .model import mlp, norm, project, to_numpy


class Cache:
    """The keys and values of each layer, for texts of up to `capacity`."""

    def __init__(self, model, capacity):
        config = model.config
        shape = 1, capacity, config.num_heads, config.head_dim
        self.seqlen = self.appended = 0
        self.layers = [
            tuple(model.xp.zeros(shape, config.attention_dtype) for _ in "kv")
            for _ in range(config.num_layers)
        ]

    def attend(self, layer, q, k, v, visible):
        """Append k and v, then attend from q to what is stored.

        `visible` are the options of the mask.
        """
        return cuflash.forward_kvcache(
            q,
            *self.layers[layer],
            k_new=k,
            v_new=v,
            cache_seqlens=self.seqlen,
            **visible,
        )

    def keep(self, nodes):
        """Drop all but some of the last pass's tokens, in this order."""
        first = self.seqlen - self.appended
        for array in (x for layer in self.layers for x in layer):
            kept = array[:, [first + node for node in nodes]]
            array[:, first : first + len(nodes)] = kept
        self.seqlen = first + len(nodes)


def in_tree(b, h, q_idx, kv_idx, *, is_ancestor, seqlen_q, seqlen_k):
    """A mask: each node of a tree sees the text, its ancestors and itself."""
    length = seqlen_k - seqlen_q
    return (kv_idx < length) | is_ancestor[q_idx, kv_idx - length]


def extend(model, tokens, cache, tree=None):
    """Append tokens (1, T) to the cache; return their logits (1, T, V).

    The equations are those of Transformer.forward. The tokens are a text, or
    the nodes of a tree (drafts.py).
    """
    p, config, xp = model.p, model.config, model.xp
    depths = range(tokens.shape[1]) if tree is None else tree.depths
    positions = [cache.seqlen + depth for depth in depths]
    if max(positions) >= config.seqlen:
        raise ValueError(f"the model has {config.seqlen} positions")
    visible = {"causal": True}
    if tree is not None:
        arrays = {"is_ancestor": xp.asarray(tree.is_ancestor())}
        visible = {"mask_mod": in_tree, "mod_arrays": arrays}
    x = p["embed"][tokens] + p["position"][positions]
    for i in range(config.num_layers):
        n, _ = norm(x, p[f"{i}.norm1"])
        out = cache.attend(i, *project(n, p[f"{i}.qkv"], config), visible)
        x = x + out.reshape(x.shape).astype(x.dtype) @ p[f"{i}.out"]
        n, _ = norm(x, p[f"{i}.norm2"])
        y, _ = mlp(n, p[f"{i}.mlp_in"], p[f"{i}.mlp_out"])
        x = x + y
    cache.appended = len(positions)
    cache.seqlen += cache.appended
    return norm(x, p["norm"])[0] @ p["logits"]


def greedy(logits):
    """Choose the token with the largest logit."""
    return int(logits.argmax())


def sampler(seed, temperature=0.7):
    """Return a function that draws a character by its logits."""
    rng = np.random.default_rng(seed)

    def draw(logits):
        scores = logits.astype(np.float64) / temperature
        weights = np.exp(scores - scores.max())
        return int(rng.choice(len(weights), p=weights / weights.sum()))

    return draw


def generate(model, prompt, count, choose, cache=None):
    """Continue `prompt` by `count` tokens.

    Parameters
    ----------
    prompt : list of int
    choose : callable
        Returns the next token, given the logits (V,) as a NumPy array.
    cache : Cache, optional
        An empty one; without it, each token costs a pass over the last
        config.seqlen tokens.

    Returns
    -------
    tokens : list of int
        Without the prompt.
    logits : array, (count, V)
        By which each was chosen.
    """
    tokens, rows = list(prompt), []
    for _ in range(count):
        if cache is None:
            seen = tokens[-model.config.seqlen :]
            logits, _ = model.forward(model.xp.asarray([seen]))
        else:
            seen = tokens[cache.seqlen :]
            logits = extend(model, model.xp.asarray([seen]), cache)
        rows.append(to_numpy(logits[0, -1]))
        tokens.append(choose(rows[-1]))
    return tokens[len(prompt) :], np.array(rows)
