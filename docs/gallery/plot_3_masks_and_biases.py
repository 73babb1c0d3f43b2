"""
Masks, biases and sinks
=======================

What each option of `cuflash.forward` does to the weights of one head with 24
queries and 32 keys. Masks are aligned at the end: the last query sees the last
key.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

import cuflash

seqlen_q, seqlen_k, head_dim = 24, 32, 16
rng = np.random.default_rng(0)
q = 2 * rng.standard_normal((1, seqlen_q, 1, head_dim))
k = rng.standard_normal((1, seqlen_k, 1, head_dim))
identity = np.eye(seqlen_k)[None, :, None]


def weights(**options):
    """Return P, (seqlen_q, seqlen_k): attention to the identity."""
    return cuflash.forward(q, k, identity, **options)[0, :, 0]


def ids(seqlen, *starts):
    """Return segment ids: one more from each start on."""
    after = np.arange(seqlen)[:, None] >= np.array(starts)
    return after.sum(axis=1).astype(np.int32)[None]


# %%
# Masks decide which pairs exist. White pairs are not visible, and nothing is
# computed where a whole tile is white.

striped = (np.arange(seqlen_k) - np.arange(seqlen_q)[:, None]) % 4 != 0
masks = {
    "none": {},
    "causal=True": {"causal": True},
    "window=(6, 0)": {"window": (6, 0)},
    "window=(3, 3)": {"window": (3, 3)},
    "segment ids": {
        "segment_ids_q": ids(seqlen_q, 6, 15),
        "segment_ids_k": ids(seqlen_k, 8, 20),
    },
    "mask": {"mask": striped},
}


def draw(options):
    fig, axes = plt.subplots(
        2, 3, figsize=(9, 5.4), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (name, chosen) in zip(axes.flat, options.items(), strict=True):
        p = weights(**chosen)
        shown = ax.imshow(
            np.where(p > 0, p, np.nan),
            cmap="viridis",
            norm=LogNorm(1e-4, 1),
        )
        ax.set_title(name, fontsize=10)
    fig.supxlabel("key")
    fig.supylabel("query")
    fig.colorbar(shown, ax=axes, label="weight", extend="min")


draw(masks)

# %%
# Score modifications change how much a pair weighs, not whether it exists.
#
# - ALiBi takes off a slope times the distance.
# - A bias is any array, here a ridge.
# - A softcap bounds scores, so weights come closer together.
# - A sink takes a part of each row's weight, and has no value: rows add up to
#   less than 1.
# - Dropout sets weights to 0 and makes the others larger.

distance = abs(np.arange(seqlen_q)[:, None] + 8 - np.arange(seqlen_k))
ridge = np.where(distance % 8 == 0, 2.0, -2.0)
modifications = {
    "none": {},
    "alibi_slopes": {"alibi_slopes": np.array([0.3], np.float32)},
    "bias": {"bias": ridge},
    "softcap=1": {"softcap": 1.0},
    "sink": {"sink": np.array([4.0])},
    "dropout=0.3": {"dropout": 0.3, "seed": 0},
}
draw(modifications)

# %%
# The sum of each row tells what the sink took.

taken = 1 - weights(sink=np.array([4.0])).sum(axis=1)
print(f"the sink takes {taken.min():.0%} to {taken.max():.0%} of a row")
