r"""
Online softmax, step by step
============================

A row of attention needs the softmax of all its scores, but a kernel sees them
tile by tile. It keeps three numbers, or vectors, per row:

.. math::
    m' &= \max(m, \mathrm{rowmax}(S)),\quad P = e^{S - m'} \\
    l' &= l e^{m - m'} + \mathrm{rowsum}(P) \\
    acc' &= acc\, e^{m - m'} + P V

and divides once, at the end: out = acc / l. This is `TileState.update
<cuflash.reference.tile_state.TileState>`, drawn here for one row of 24 keys in
tiles of 4.
"""

import matplotlib.pyplot as plt
import numpy as np

from cuflash.reference.attention import attention
from cuflash.reference.tile_state import TileState

rng = np.random.default_rng(5)
num_keys, block_k, head_dim = 24, 4, 2
scores = 1.5 * rng.standard_normal((1, num_keys)) + np.linspace(-1, 1, 24)
values = rng.standard_normal((num_keys, head_dim)).cumsum(axis=0) / 3

# %%
# Each line is the state after one tile. When m grows, l and acc shrink by the
# same factor, so that both stay sums of exp(score - m).

state = TileState.empty((1,), head_dim)
steps = [state]
for start in range(0, num_keys, block_k):
    keys = slice(start, start + block_k)
    state = state.update(scores[:, keys], values[keys])
    steps.append(state)
    print(state)

# %%
# The running maximum steps up to the largest score. Dividing at any time gives
# exact attention over the keys seen so far.

seen = np.arange(0, num_keys + 1, block_k)
fig, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True)
for start in seen[:-1:2]:
    for ax in axes:
        ax.axvspan(start, start + block_k, color="0.94", zorder=0)
axes[0].bar(np.arange(num_keys) + 0.5, scores[0], color="C0", label="score")
axes[0].step(
    seen[1:],
    [s.m[0] for s in steps[1:]],
    where="pre",
    color="C3",
    label="m, the running maximum",
)
axes[0].legend(loc="upper left")
axes[0].set_ylabel("score")

axes[1].plot(seen, [s.l[0] for s in steps], "o-", label="l, as kept")
total = [s.l[0] * np.exp(s.m[0] - steps[-1].m[0]) for s in steps]
axes[1].plot(seen, total, "s--", label="l, relative to the last m")
axes[1].legend()
axes[1].set_ylabel("sum of exponentials")

for column in range(head_dim):
    out = [s.finalize()[0][0, column] for s in steps]
    axes[2].plot(seen, out, "o-", label=f"acc / l, column {column}")
axes[2].legend()
axes[2].set(ylabel="out so far", xlabel="keys seen", xticks=seen)
fig.tight_layout()

# %%
# The last state is attention, though no step saw more than four scores.

one_hot = np.eye(num_keys)
q = scores  # so that q · one_hot are the scores
expected, lse = attention(q, one_hot, values, scale=1.0)
print(steps[-1].finalize()[0], "=", expected)
assert np.allclose(steps[-1].finalize()[0], expected, rtol=1e-14)
