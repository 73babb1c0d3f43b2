"""
Heads of a trained model
========================

The transformer of ``scripts/demo.py``, trained here for some seconds on the
documentation of Python: where its layers look, what that adds up to over all
of them, and how widely each head looks. To run it by itself, set
``PYTHONPATH=scripts``.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

import cuflash
from demo_parts.model import Config, Transformer
from demo_parts.text import Corpus, load_text
from demo_parts.training import train

config = replace(Config(), steps=200)
corpus = Corpus(load_text())
model = Transformer(config, len(corpus.vocabulary), np)
quiet = Console(quiet=True)
_, losses = train(model, corpus, seconds=25, seed=0, console=quiet)
print(f"nats a character: {losses[0][1]:.2f}, then {losses[-1][1]:.2f}")


def layers_of(tokens):
    """Return q, k, lse of each layer."""
    _, saved = model.forward(tokens)
    for i in range(config.num_layers):
        _, q, k, _, _, lse = saved[f"{i}.attention"]
        yield q, k, lse


# %%
# Attention rollout (Abnar and Zuidema, 2020) asks which characters a layer's
# output comes from, if half of it passes beside attention: the product of
# (W + I) / 2 over layers, where W is the mean of a layer's heads.

text = "return x if x in the list else return None"
tokens = corpus.encode(text)[None]
means = [
    cuflash.weights(q, k, lse, causal=True)[0].mean(axis=0)
    for q, k, lse in layers_of(tokens)
]
rollout = identity = np.eye(len(text))
for mean in means:
    rollout = (mean + identity) / 2 @ rollout

# %%
# Rows are queries, columns keys. Most of a character comes from itself, so
# the diagonal of the rollout would hide all else: it is left out.

panels = {f"layer {i}": mean for i, mean in enumerate(means, 1)}
panels["rollout, without its diagonal"] = rollout * (1 - identity)
letters = text.replace(" ", "\u00b7")
fig, axes = plt.subplots(
    1, len(panels), figsize=(15, 5.6), layout="constrained"
)
for ax, (title, values) in zip(axes, panels.items(), strict=True):
    # The first rows see so few keys that their weights are large.
    largest = values[8:].max()
    image = ax.imshow(values, cmap="Blues", vmin=0, vmax=largest)
    ax.set_title(title)
    font = {"fontfamily": "monospace", "fontsize": 7}
    ax.set_xticks(range(len(text)), letters, **font)
    ax.set_yticks(range(len(text)), letters, **font)
    ax.tick_params(length=0, pad=2)
    fig.colorbar(image, ax=ax, shrink=0.6, location="bottom", aspect=30)
axes[0].set_ylabel("query")
fig.supxlabel("key")

assert np.allclose(rollout.sum(axis=-1), 1, rtol=1e-4)

# %%
# The entropy of each query's weights, on text unseen in training. A query
# that sees n keys has log n at most, the dashed line; a head that stays far
# below it looks at few characters wherever it is.

many = replace(config, batch=256)
tokens, _ = corpus.batch(corpus.validation, many, np.random.default_rng(1))
entropies = [
    cuflash.entropy(q, k, lse, causal=True).mean(axis=0)
    for q, k, lse in layers_of(tokens)
]
visible = np.arange(1, config.seqlen + 1)
fig, axes = plt.subplots(
    1, config.num_layers + 1, figsize=(13, 3.8), layout="constrained"
)
for i, (ax, heads) in enumerate(zip(axes, entropies, strict=False), 1):
    for head, entropy in enumerate(heads, 1):
        ax.plot(visible, entropy, label=f"head {head}")
    ax.plot(visible, np.log(visible), "--", color="gray")
    ax.set(title=f"layer {i}", xlabel="visible keys", ylim=(0, 4.3))
axes[0].set_ylabel("entropy, nats")
axes[0].legend(loc="lower right", ncols=2)

# %%
# Their means over queries: a number for each head, the one to watch in
# training. A head whose entropy falls to 0 early has collapsed.

table = np.array([heads.mean(axis=-1) for heads in entropies])
largest = np.log(visible).mean()
ax = axes[-1]
ax.imshow(table, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
for (i, j), value in np.ndenumerate(table):
    colour = "white" if value > 0.65 * largest else "black"
    ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour)
ax.set_xticks(range(config.num_heads), range(1, config.num_heads + 1))
ax.set_yticks(range(config.num_layers), range(1, config.num_layers + 1))
ax.set(title=f"mean, of {largest:.2f} at most", xlabel="head", ylabel="layer")

assert (0 <= table).all() and (table <= largest).all()
