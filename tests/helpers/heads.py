"""Converts between the public layout and the reference's.

Public: (batch, seqlen, heads, head_dim), grouped heads. Reference: any
leading axes, then (seqlen, head_dim), and as many key heads as query heads.
"""

import numpy as np


def heads_first(array, num_heads_q=None):
    """Return (batch, heads, seqlen, ...), key heads repeated for a group."""
    array = array.swapaxes(1, 2)
    if num_heads_q is None or array.shape[1] == 0:
        return array
    return np.repeat(array, num_heads_q // array.shape[1], axis=1)


def heads_last(array):
    return array.swapaxes(1, 2)


def sum_groups(array, num_heads_kv):
    """Add up the query heads that share a key head, on axis 1."""
    batch, heads, *rest = array.shape
    group = heads // num_heads_kv if num_heads_kv else 0
    return array.reshape(batch, num_heads_kv, group, *rest).sum(axis=2)


def visible(seqlen_q, seqlen_k, causal):
    """Return the dense mask; deliberately a second implementation."""
    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_k)[None, :]
    return (j <= i + seqlen_k - seqlen_q) | (not causal)
