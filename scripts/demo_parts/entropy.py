"""How widely the model's heads look: the entropy of their weights."""

from __future__ import annotations

import numpy as np

import cuflash

from .model import to_numpy


def head_entropies(layers):
    """Return the mean entropy of each head, in nats.

    Parameters
    ----------
    layers : list of tuple
        (x, q, k, v, out, lse) of each layer, as `model.attention` saves it.

    Returns
    -------
    entropies : numpy array, (num_layers, num_heads)
        Means over the texts of the batch and over their queries.
    """
    found = [
        cuflash.entropy(q, k, lse, causal=True).mean(axis=(0, 2))
        for _, q, k, _, _, lse in layers
    ]
    return np.stack([to_numpy(x) for x in found])


def largest_entropy(seqlen):
    """Return the mean entropy of a head that looks at all keys alike.

    Query i sees i + 1 keys, so its entropy is log(i + 1) at most.
    """
    return float(np.log(np.arange(1, seqlen + 1)).mean())
