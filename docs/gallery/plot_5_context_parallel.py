"""
Context parallelism: predicted efficiency
=========================================

n GPUs that share a sequence compute with each other's keys
(``cuflash.distributed``). The reference has the schedule
(`context_parallel <cuflash.reference.context_parallel>`), and predicts the
time of n GPUs from two rates.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from cuflash.reference import context_parallel
from cuflash.reference.context_parallel import Sharded

# %%
# Under a causal mask, contiguous chunks give the last rank nearly twice the
# mean work; with zigzag order all ranks have the same in every step.

fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for ax, layout in zip(axes, ("contiguous", "zigzag"), strict=True):
    shared = Sharded(8, 8 * 64, layout, causal=True)
    pairs = [[step.pairs for step in shared.steps(r)] for r in range(8)]
    ax.imshow(np.array(pairs) / 1e3, cmap="YlGn", vmin=0, vmax=4.1)
    ax.set(title=layout, xlabel="step", ylabel="rank")
fig.suptitle("visible pairs of 8 ranks")

# %%
# Efficiency is the time of one GPU for the whole sequence, over n times that
# of n GPUs. The prediction takes 600 TFLOP/s of a GPU and 300 GB/s of its
# links, of 32 query heads and 8 key heads of 128 columns in bfloat16: a step
# takes as long as its arithmetic, or as the arrays that travel meanwhile.

RATES = {"flops_rate": 600e12, "link_rate": 300e9}
HEADS = context_parallel.Heads(32, 8, 128, element_bytes=2)
ranks = 2 ** np.arange(1, 11)
seqlens = 2 ** np.arange(15, 24, 2)


def efficiencies(seqlen, backward):
    for size in ranks:
        shared = Sharded(int(size), int(seqlen), causal=True)
        found = context_parallel.predict(
            shared, HEADS, backward=backward, **RATES
        )
        yield 100 * found.efficiency


fig, axes = plt.subplots(
    1, 2, figsize=(10, 4.5), layout="constrained", sharey=True
)
for ax, backward in zip(axes, (False, True), strict=True):
    for seqlen in seqlens:
        label = f"{seqlen // 1024:,}k tokens"
        ax.plot(ranks, [*efficiencies(seqlen, backward)], label=label)
    ax.set(
        xscale="log", xlabel="GPUs", title=("forward", "backward")[backward]
    )
    ax.set_xticks(ranks, ranks)
axes[0].set_ylabel("efficiency, %")
axes[0].legend()

# %%
# What was measured stands beside it: ``python -m cuflash.distributed.bench``
# with ``--json docs/benchmarks/distributed.json``. The prediction knows
# neither launches nor merging, nor that smaller blocks are slower.

file = Path("docs/benchmarks/distributed.json")
cells = json.loads(file.read_text())["cells"] if file.exists() else []
for cell in cells:
    if cell["gpus"] > 1 and cell["ulysses"] == 1:
        place = cell["gpus"], 100 * cell["forward"]["efficiency"]
        axes[0].plot(*place, "ko")
        axes[0].annotate(f"{cell['seqlen'] // 1024}k", place)
        print(cell["gpus"], "GPUs,", cell["seqlen"], "tokens: forward",
              f"{place[1]:.1f} %")  # fmt: skip
