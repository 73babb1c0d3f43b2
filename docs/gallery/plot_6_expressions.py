"""
Scores and masks of your own
============================

The ten variants of the guide to expressions: what ``score_mod`` adds to a
score, which pairs ``mask_mod`` leaves, and which tiles a kernel visits.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import cuflash

SEQLEN, BLOCK, HEADS = 64, 8, 4
rng = np.random.default_rng(0)


def draw_tiles(ax, mask_mod, arrays, head=0, seqlen_q=SEQLEN):
    """Draw the pairs of a head by the kind of their tile."""
    sizes = {"num_heads": HEADS, "seqlen_q": seqlen_q, "seqlen_k": SEQLEN}
    pairs, tiles = (
        cuflash.tile_mask(
            mask_mod, mod_arrays=arrays, block_q=n, block_k=n, **sizes
        )
        for n in (1, BLOCK)
    )
    visible = pairs.flags[0, head % pairs.flags.shape[1]] == 2
    flags = tiles.flags[0, head % tiles.flags.shape[1]]
    ax.set_xlabel(f"{np.mean(flags > 0):.0%} of tiles visited", fontsize=9)
    flags = flags.repeat(BLOCK, 0).repeat(BLOCK, 1)[: len(visible)]
    ax.imshow(np.where(visible, 1 + flags, flags > 0), KINDS, vmin=0, vmax=3)
    grid(ax, len(visible))


def grid(ax, rows):
    lines = np.arange(BLOCK, SEQLEN, BLOCK) - 0.5
    ax.vlines(lines, -0.5, rows - 0.5, color="gray", lw=0.4)
    ax.hlines(lines[lines < rows - 1], -0.5, SEQLEN - 0.5, "gray", lw=0.4)
    ax.set(xticks=[], yticks=[])


COLOURS = {
    "skipped tile": "#d9d9d9",
    "masked pair": "white",
    "visible pair, tested": "#7fb3d5",
    "visible pair, not tested": "#1f4e79",
}
KINDS = ListedColormap([*COLOURS.values()])

# %%
# Masks. Of grey tiles nothing is computed, in dark ones no pair is tested.


def prefix_lm(b, h, q_idx, kv_idx, *, prefix):
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def documents(b, h, q_idx, kv_idx, *, ids):
    return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])


def dilated(b, h, q_idx, kv_idx, *, reach, step):
    distance = q_idx - kv_idx
    near = (distance >= 0) & (distance < reach * step)
    return near & (distance % step == 0)


def image(b, h, q_idx, kv_idx, *, height, width, radius):
    y = np.clip(q_idx // width, radius, height - 1 - radius)
    x = np.clip(q_idx % width, radius, width - 1 - radius)
    rows = abs(y - kv_idx // width) <= radius
    return rows & (abs(x - kv_idx % width) <= radius)


def tree(b, h, q_idx, kv_idx, *, is_ancestor, seqlen_q, seqlen_k):
    context = seqlen_k - seqlen_q
    return (kv_idx < context) | is_ancestor[q_idx, kv_idx - context]


def windows(b, h, q_idx, kv_idx, *, window):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window[h])


# 24 drafts: each hangs on one of the three before it.
is_ancestor = np.eye(24, dtype=bool)
for node in range(1, 24):
    parent = rng.integers(max(0, node - 3), node)
    is_ancestor[node] |= is_ancestor[parent]

ids = np.repeat(range(4), (20, 9, 24, 11))[None]
window = {"window": np.array([4, 12, 24, 64])}
square = {"height": 8, "width": 8, "radius": 2}
masks = {
    "prefix LM": (prefix_lm, {"prefix": np.array([20])}),
    "documents": (documents, {"ids": ids}),
    "dilated neighbourhood": (dilated, {"reach": 5, "step": 3}),
    "neighbourhood in an image": (image, square),
    "tree of drafts": (tree, {"is_ancestor": is_ancestor}, 0, 24),
    "windows, head 0": (windows, window),
    "windows, head 1": (windows, window, 1),
    "windows, head 2": (windows, window, 2),
}
fig, axes = plt.subplots(2, 4, figsize=(11, 6.2), layout="constrained")
for ax, (name, drawn) in zip(axes.flat, masks.items(), strict=True):
    draw_tiles(ax, *drawn)
    ax.set_title(name, fontsize=10)
fig.supxlabel("key")
fig.supylabel("query")
fig.legend(
    handles=[
        Patch(facecolor=colour, edgecolor="gray", label=name)
        for name, colour in COLOURS.items()
    ],
    loc="outside upper center",
    ncols=4,
    fontsize=9,
)

# %%
# Scores: what each function adds to the scores of four heads. They depend on
# the distance alone, so a row of the matrix tells all.


def relative(score, b, h, q_idx, kv_idx, *, table):
    return score + table[h, q_idx - kv_idx + SEQLEN - 1]


def t5(score, b, h, q_idx, kv_idx, *, weights):
    distance = np.maximum(q_idx - kv_idx, 0)
    octaves = np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16)
    far = np.minimum(16 + (16 * octaves).astype(int), 31)
    return score + weights[h, np.where(distance < 16, distance, far)]


def kerple(score, b, h, q_idx, kv_idx, *, strength, rate):
    return score - strength[h] * np.log1p(rate[h] * abs(q_idx - kv_idx))


def cosine(score, b, h, q_idx, kv_idx, *, amplitude, frequency):
    return score + amplitude[h] * np.cos(frequency[h] * (q_idx - kv_idx))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def smooth(*shape):
    """Return a table that changes slowly, as learned ones do."""
    noise = rng.standard_normal((*shape[:-1], shape[-1] + 12))
    kernel = np.hanning(13) / np.sqrt(np.sum(np.hanning(13) ** 2))
    rows = noise.reshape(-1, noise.shape[-1])
    kept = [np.convolve(x, kernel, "valid") for x in rows]
    return np.reshape(kept, shape)


head = np.arange(HEADS)
strengths = {"strength": 0.4 + 0.3 * head, "rate": 0.5 * 2.0**-head}
waves = {"amplitude": 1 - 0.2 * head, "frequency": np.pi / (4 + 6 * head)}
scores = {
    "relative table": (relative, {"table": smooth(HEADS, 2 * SEQLEN - 1)}),
    "T5 buckets": (t5, {"weights": smooth(HEADS, 32)}),
    "distance decay": (kerple, strengths),
    "cosine bias": (cosine, waves),
}
indices = np.ogrid[:1, :HEADS, :SEQLEN, :SEQLEN]
fig, axes = plt.subplots(2, 4, figsize=(11, 5.4), layout="constrained")
for (above, below), (name, (score_mod, arrays)) in zip(
    axes.T, scores.items(), strict=True
):
    added = score_mod(0.0, *indices, **arrays)[0]
    shown = np.where(causal(*indices)[0, 0], added[0], np.nan)
    picture = above.imshow(shown, "RdBu_r", vmin=-2, vmax=2)
    grid(above, SEQLEN)
    above.set_title(name, fontsize=10)
    for h in head:
        below.plot(np.arange(SEQLEN), added[h, -1, ::-1], label=f"head {h}")
    below.set_xlabel("distance")
axes[0, 0].set_ylabel("query, head 0")
axes[1, 0].set_ylabel("added to the score")
axes[1, 2].legend(fontsize=8)
fig.colorbar(picture, ax=axes[0], label="added", extend="both")

# %%
# The gradient of an element of the table is the sum of the gradients of all
# scores that read it: here of each distance. The causal mask leaves half.

q, k, v, dout = rng.standard_normal((4, 1, SEQLEN, HEADS, 16))
options = {
    "score_mod": relative,
    "mask_mod": causal,
    "mod_arrays": scores["relative table"][1],
}
out, lse = cuflash.forward(q, k, v, return_lse=True, **options)
*_, dmod = cuflash.backward(
    dout, q, k, v, out, lse, return_dmod=("table",), **options
)
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for h in head:
    ax.plot(np.arange(1 - SEQLEN, SEQLEN), dmod["table"][h], label=f"head {h}")
ax.legend(fontsize=8, loc="upper left")
ax.set(xlabel="query - key", ylabel="gradient of the table")
