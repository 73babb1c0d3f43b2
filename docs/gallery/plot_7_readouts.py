"""
What attention looked at
========================

A long text, and three questions that need no seqlen x seqlen matrix: which
tokens matter, how widely each head looks, and where the last query looks.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

SEQLEN, HEAD_DIM = 4096, 32
rng = np.random.default_rng(0)

# %%
# Four heads made by hand, of the habits that models learn. Each token has a
# random vector; eight *needles* have keys that all queries of a head like.
#
# - *local*: queries and keys are rotated by position, so near ones agree.
# - *sink*: all look at the first token.
# - *needles*: all look at the needles.
# - *mean*: all scores are near 0.

token = rng.standard_normal((SEQLEN, HEAD_DIM)).astype("float32")
needles = np.sort(rng.choice(SEQLEN, 8, replace=False))
liked = np.full(HEAD_DIM, 1.5, dtype="float32")
same = np.full((SEQLEN, HEAD_DIM), 0.8, dtype="float32")
cos, sin = cuflash.rotary_tables(SEQLEN, HEAD_DIM, 300.0, dtype="float32")
rotated = cuflash.apply_rotary(same[None, :, None], cos, sin)[0, :, 0]

to_first, to_needles = (np.array(0.3 * token) for _ in range(2))
to_first[0] = to_needles[needles] = liked
heads = {
    "local": (2 * rotated, 2 * rotated),
    "sink": (np.full_like(token, 1.0), to_first),
    "needles": (np.full_like(token, 1.0), to_needles),
    "mean": (0.3 * token, 0.3 * token),
}
q, k = (np.stack(x, axis=1) for x in zip(*heads.values(), strict=True))
_, lse = cuflash.forward(q, k, k, causal=True, return_lse=True)

# %%
# From q, k and lse: a number for each key, one for each query, and a row of
# the matrix for the last query. The mean over the queries that see a key is
# fair to late ones.

sums = cuflash.weight_sums(q, k, lse, causal=True)
importance = sums / (SEQLEN - np.arange(SEQLEN))
entropy = cuflash.entropy(q, k, lse, causal=True)
last = cuflash.weights(q, k, lse, queries=[-1], causal=True)[:, 0]

# %%
# The needles stand out in one head, the first token in another. exp(entropy)
# is the number of keys that a query looks at, as if it gave them equal
# weights: in the head without a preference all that there are, the dashed
# line.

fig, axes = plt.subplots(3, len(heads), figsize=(11, 7), sharex="row")
for column, name in enumerate(heads):
    top, middle, bottom = axes[:, column]
    top.set_title(name)
    top.semilogy(importance[column, :-64], lw=0.6)
    middle.loglog(1 + np.arange(SEQLEN), np.exp(entropy[column]), lw=0.8)
    middle.loglog([1, SEQLEN], [1, SEQLEN], "--", color="gray", lw=0.8)
    bottom.semilogy(np.maximum(last[column], 1e-8), lw=0.6)
    middle.set_xlabel("query")
    bottom.set_xlabel("key")
for ax, label in zip(
    axes[:, 0],
    ("mean weight of a key", "keys looked at", "last query's weights"),
    strict=True,
):
    ax.set_ylabel(label)
fig.tight_layout()

assert np.allclose(sums.sum(axis=-1), SEQLEN, rtol=1e-4)
found = np.sort(np.argsort(importance[2, :-64])[-8:])
assert np.array_equal(found, needles)
