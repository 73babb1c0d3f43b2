"""The pictures of the demo."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import cuflash

from .model import to_numpy

INK, GREY, BLUE, RED = "#222222", "#8a8a8a", "#2166ac", "#c8553d"


def new_figure(width, height, title):
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    axes.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def draw_loss(path, training, validation, vocabulary_size):
    """Plot the loss by step, on training batches and on unseen text."""
    figure, axes = new_figure(6.4, 3.8, "Loss while training")
    steps, losses = np.array(training).T
    axes.plot(steps, losses, color=BLUE, alpha=0.35, linewidth=1)
    axes.plot(
        steps,
        smoothed(losses),
        color=BLUE,
        linewidth=2,
        label="training (and its running mean)",
    )
    steps, losses = np.array(validation).T
    axes.plot(
        steps,
        losses,
        color=RED,
        marker="o",
        markersize=4,
        linewidth=1.2,
        label="lists never trained on",
    )
    guess = math.log(vocabulary_size)
    axes.axhline(guess, color=GREY, linewidth=1, linestyle="--")
    axes.annotate(
        f"guessing among {vocabulary_size} words: "
        f"ln {vocabulary_size} = {guess:.2f}",
        (1, guess),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color=GREY,
    )
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.set_ylabel("loss (nats a word)", fontsize=9, color=INK)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, loc="center right")
    figure.savefig(path)


def smoothed(losses, keep=0.9):
    """Return the running mean; a value's weight decays by `keep` per step."""
    total = weight = 0.0
    means = []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1
        means.append(total / weight)
    return means


def picture_attention(path, model, lists, rng):
    """Draw the layer that looks most at the word to be written next."""
    config = replace(model.config, batch=1)
    tokens, _ = lists.batch(lists.validation, config, rng)
    _, saved = model.forward(model.xp.asarray(tokens))
    length = tokens.shape[1] // 2
    # Row i has to write the word that is i-th in order: in which column?
    following = np.argsort(tokens[0, :length])
    layers = []
    for layer in range(config.num_layers):
        _, q, k, _, _, lse = saved[f"{layer}.attention"]
        written, listed = slice(length, None), slice(length)
        weights = cuflash.weights(
            q, k, lse, causal=True, queries=written, keys=listed
        )
        p = to_numpy(weights[0]).max(axis=0)
        title = f"Where layer {layer + 1} looks: the largest weight of a head"
        layers.append((p[range(length), following].mean(), title, p))
    _, title, p = max(layers, key=lambda layer: layer[0])
    words = [lists.vocabulary[i] for i in tokens[0]]
    draw_attention(path, p, words[length:], words[:length], following, title)


def draw_attention(path, p, queries, keys, following, title):
    """Plot weights, with the words along both axes; mark the next words."""
    figure, axes = new_figure(7.2, 7.4, title)
    image = axes.imshow(p, cmap="Blues", vmin=0, vmax=1)
    axes.plot(
        following, range(len(following)), "s", color=RED, markersize=11,
        markerfacecolor="none", label="the word that comes next",
    )  # fmt: skip
    axes.legend(
        frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1)
    )
    axes.set_xticks(range(len(keys)), keys, fontsize=8, rotation=90)
    axes.set_yticks(range(len(queries)), queries, fontsize=8)
    axes.tick_params(length=0, pad=2)
    axes.set_xlabel("key: a word of the list", fontsize=9, color=INK)
    axes.set_ylabel("query: the word written last", fontsize=9, color=INK)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, aspect=30, pad=0.02)
    bar.set_label("weight", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    figure.savefig(path)


def draw_memory(path, table):
    """Plot memory by seqlen, both axes logarithmic."""
    figure, axes = new_figure(
        6.4, 3.8, "Memory of one forward and backward pass"
    )
    seqlens = [seqlen for seqlen, _ in table]
    for i, (name, colour) in enumerate(
        {"cuflash": BLUE, "materialised": RED}.items()
    ):
        sizes = [cost[i][1] / 2**20 for _, cost in table]
        axes.plot(seqlens, sizes, color=colour, marker="o", markersize=5)
        axes.annotate(
            name,
            (seqlens[-1], sizes[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(seqlens, [f"{s:,}" for s in seqlens])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.minorticks_off()
    axes.margins(x=0.18)
    axes.set_xlabel("tokens (batch 1)", fontsize=9, color=INK)
    axes.set_ylabel("MiB beyond the inputs", fontsize=9, color=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.savefig(path)
