"""
Tile sizes: what a sweep found
==============================

``make sweep`` times every tile that a kernel supports and keeps the fastest in
a table. This is the table of the H200 that comes with cuflash, for the Hopper
kernels in bfloat16.
"""

import json
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np

from cuflash.reference import traffic

tables = files("cuflash.plans") / "tile_tables"
table = json.loads((tables / "sm_90.json").read_text())
entries = [
    entry
    for entry in table["tiles"]
    if entry["family"] == "sm90" and "measured" in entry
]
print(len(entries), "entries of", entries[0]["measured"]["device"])

# %%
# Each field names the fastest tile, queries × keys, and its speed. Long
# sequences take more keys a tile; large heads leave room for fewer.


def draw(ax, direction, causal):
    cells = {  # of several entries the last, with most work for an SM
        (entry["head_dim"], entry["seqlen"]): entry
        for entry in sorted(entries, key=lambda x: x["tiles_per_sm"])
        if (entry["direction"], entry["causal"]) == (direction, causal)
    }
    head_dims, seqlens = (sorted({*x}) for x in zip(*cells, strict=True))
    speed = np.full((len(head_dims), len(seqlens)), np.nan)
    for (head_dim, seqlen), entry in cells.items():
        row, column = head_dims.index(head_dim), seqlens.index(seqlen)
        tile, tflops = entry["tile"], entry["measured"]["tflops"]
        words = f"{tile['block_q']} × {tile['block_k']}\n{tflops:.0f}"
        ax.text(column, row, words, ha="center", va="center", fontsize=9)
        speed[row, column] = tflops
    ax.imshow(speed, cmap="YlGn", vmin=100, vmax=1000, aspect="auto")
    ax.set_xticks(range(len(seqlens)), [f"{n:,}" for n in seqlens])
    ax.set_yticks(range(len(head_dims)), head_dims)
    ax.set_title(f"{direction}, {'causal' if causal else 'full'}")


fig, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
for row, direction in zip(axes, ("forward", "backward"), strict=True):
    for ax, causal in zip(row, (False, True), strict=True):
        draw(ax, direction, causal)
fig.supxlabel("seqlen")
fig.supylabel("head_dim")
fig.suptitle("fastest tile, and TFLOP/s")

# %%
# Why tiles are large at all: K and V are read once for each query tile, so
# twice the queries is half the traffic. The reference counts it
# (`traffic <cuflash.reference.traffic>`); one head, 4,096 tokens, head_dim 64.

blocks = 2 ** np.arange(0, 13)


def moved(counts, block):
    sizes = traffic.Sizes(4096, 4096, 64, 64, int(block), int(block))
    return traffic.total(counts(sizes))


fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
for name, counts in {
    "query-outer (FlashAttention-2)": traffic.forward_query_outer_counts,
    "key-outer (FlashAttention)": traffic.forward_key_outer_counts,
    "materialised": traffic.forward_materialised_counts,
    "the least possible": traffic.forward_row_by_row_counts,
}.items():
    ax.plot(blocks, [moved(counts, block) for block in blocks], label=name)
ax.axvspan(64, 192, color="0.9", zorder=0, label="tiles of kernels")
ax.set(xscale="log", yscale="log", xlabel="tokens of a tile")
ax.set_xticks(blocks[::2], [f"{n:,}" for n in blocks[::2]])
ax.set_ylabel("elements read and written")
ax.legend()
