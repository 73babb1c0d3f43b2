"""
Which words of a long text matter
=================================

65,536 words of Python's documentation, and the last 256 of them as queries:
what do they look at? The weights of all queries would take 16 GiB a head in
float32; ``weight_sums`` returns a number for each word.
"""

import re
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np

import cuflash

SEQLEN, QUERIES, HEAD_DIM = 65_536, 256, 64
rng = np.random.default_rng(0)

# %%
# The topics that ``help()`` knows, by name, but for that of ``with``: it
# stands at the end. Signs are words too.


def words_of(name):
    return re.findall(r"\w+|[^\w\s]", topics[name].lower())


words, topic_of = [], []
for name in sorted({*topics} - {"with"}):
    words += words_of(name)
    topic_of += [name] * (len(words) - len(topic_of))
end = words_of("with")
words = words[: SEQLEN - len(end)] + end
topic_of = np.array(topic_of[: SEQLEN - len(end)] + ["with"] * len(end))
assert len(words) == SEQLEN

# %%
# Three heads made by hand. Each word has a random vector.
#
# - *same word*: query and key are the word.
# - *what came next*: the query is the last three words, the key the three
#   before the word, so that a word sees what followed the same three words.
# - *same passage*: query and key are the sum of the last 64 words, in which
#   rare words have long vectors.

_, token, count = np.unique(words, return_inverse=True, return_counts=True)
vectors = rng.standard_normal((len(count), HEAD_DIM)) / HEAD_DIM**0.5
word = vectors[token]
rare = np.log(SEQLEN / count)[token] / np.log(SEQLEN)  # from 0 to 1


def later(x, n):
    """Return x with each row n places later."""
    return np.concatenate([np.zeros_like(x[:n]), x[: len(x) - n]])


three = sum(np.roll(later(word, n), n, axis=1) for n in range(3)) / 3**0.5
total = (rare[:, None] * word).cumsum(axis=0)
passage = total - later(total, 64)
passage /= np.linalg.norm(passage, axis=1, keepdims=True)
heads = {
    "same word": (14 * word, word),
    "what came next": (18 * three, later(three, 1)),
    "same passage": (20 * passage, passage),
}
q, k = (
    np.stack(x, axis=1).astype("float32")
    for x in zip(*heads.values(), strict=True)
)

# %%
# A causal mask is aligned at the end, so that the last queries can be passed
# alone. Then the cost is theirs, and not that of the whole text. Common words
# and signs count less, by ``row_weights``.

options = {"causal": True, "scale": 1.0}
q = q[-QUERIES:]
_, lse = cuflash.forward(q, k, k, return_lse=True, **options)
rows = rare[-QUERIES:].astype("float32")
sums = cuflash.weight_sums(q, k, lse, row_weights=rows, **options)

assert sums.shape == (len(heads), SEQLEN)
assert np.allclose(sums.sum(axis=-1), rows.sum(), rtol=1e-4)

# %%
# In bins of 256 words, with the topics of the highest ones: that of compound
# statements has the text of ``with`` too, the others are on the same subject.
# Bars of ``with`` itself, on the right, may be cut off.

WIDTH = 256
starts = np.arange(0, SEQLEN, WIDTH)
fig, axes = plt.subplots(
    len(heads), 1, figsize=(11, 8), sharex=True, layout="constrained"
)
for ax, name, of_head in zip(axes, heads, sums, strict=True):
    bins = of_head.reshape(-1, WIDTH).sum(axis=1)
    ax.bar(starts, bins, WIDTH, align="edge", color="#2166ac")
    others = np.where(starts < SEQLEN - len(end) - WIDTH, bins, 0)
    ax.set(title=name, ylabel="sum of weights", ylim=(0, 1.2 * others.max()))
    peaks = 1 + np.flatnonzero(
        (others[1:-1] > others[:-2]) & (others[1:-1] > others[2:])
    )
    for i in peaks[np.argsort(others[peaks])[::-1][:3]]:
        at = starts[i] + of_head[starts[i] : starts[i] + WIDTH].argmax()
        ax.annotate(
            topic_of[at], (starts[i], bins[i]), (4, 2),
            textcoords="offset points",
        )  # fmt: skip
        print(f"{name}, {topic_of[at]}: {' '.join(words[at - 8 : at + 3])}")
axes[-1].set(xlabel="word", xlim=(0, SEQLEN))
axes[-1].xaxis.set_major_formatter("{x:,.0f}")
