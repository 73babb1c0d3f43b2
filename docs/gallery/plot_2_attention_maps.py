"""
Attention maps
==============

``forward`` never stores the weights P, but ``weights`` computes those that are
asked for, from q, k and lse. Here four heads are made by hand to read a
sentence in four ways.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

text = "to be or not to be"
letters = list(text)
seqlen = len(letters)

position = np.eye(seqlen)  # row i: token i
symbol = position[[letters.index(x) for x in letters]]  # row i: its letter
before = np.vstack([np.zeros(seqlen), symbol[:-1]])  # the letter before it

# %%
# Each head has queries and keys of its own. A query finds the keys that are
# like it.
#
# - *same letter*: both are the letter.
# - *previous token*: the query is its position less one, the key its position.
# - *what came next*: the query is the letter, the key the letter before it, so
#   a token sees what followed the same letter earlier.
# - *nearby*: both are the same vector, rotated by the position.

heads = {
    "same letter": (symbol, symbol),
    "previous token": (np.roll(position, 1, axis=0), position),
    "what came next": (symbol, before),
    "nearby": (np.full(position.shape, 0.3), np.full(position.shape, 0.3)),
}
q = np.stack([8 * x for x, _ in heads.values()], axis=1)  # (seqlen, heads, d)
k = np.stack([x for _, x in heads.values()], axis=1)
cos, sin = cuflash.rotary_tables(seqlen, seqlen, 100.0, dtype=q.dtype)
for x in (q, k):
    x[None, :, 3:] = cuflash.apply_rotary(x[None, :, 3:], cos, sin)

options = {"scale": 1.0, "causal": True}
_, lse = cuflash.forward(q, k, k, return_lse=True, **options)
maps = cuflash.weights(q, k, lse, **options)  # (heads, queries, keys)

# %%
# Rows are queries, columns keys; each row adds up to 1. The upper triangle is
# empty, because the mask is causal. A query that finds nothing sees all keys
# alike.

fig, axes = plt.subplots(2, 2, figsize=(9, 9))
for ax, name, head in zip(axes.flat, heads, range(len(heads)), strict=True):
    ax.imshow(maps[head], cmap="Blues", vmin=0, vmax=1)
    ax.set_title(name)
    ax.set_xticks(range(seqlen), letters)
    ax.set_yticks(range(seqlen), letters)
fig.supylabel("query")
fig.supxlabel("key")
fig.tight_layout()

assert np.allclose(maps.sum(axis=-1), 1)
