"""Text written with a KV cache is the text written without one.

Greedy, by a tiny model in float64. Without a cache, the logits of all steps
come from one causal pass over the whole text: with a causal mask, row t of
that pass is the last row of a pass over the first t + 1 tokens. If the largest
logit of each row is the token that was written, then a run without a cache,
one pass a token, writes the same text: by induction, as each step sees the
same tokens. That is far cheaper than 2,000 passes.

Both sets of logits are within `model_bounds.logits` of the exact ones, so
they differ by at most twice that. The test also requires the two largest
logits of each row to be further apart than that, so that rounding decides no
token.
"""

import numpy as np
import pytest

import cuflash
from demo_parts.generation import Cache, extend, generate, greedy
from demo_parts.model import Config, Transformer, to_numpy
from helpers import model_bounds
from helpers.backends import CUPY, EMULATED, NUMPY
from helpers.compare import (
    assert_arrays_equal,
    assert_within,
)
from helpers.data import Case

PROMPT = [3, 1, 4, 1, 5]
PAGE_SIZE = 16


class PagedCache(Cache):
    """The same in pages, in a random order."""

    def __init__(self, model, capacity):
        super().__init__(model, 0)
        config, pages = model.config, -(-capacity // PAGE_SIZE)
        shape = pages, PAGE_SIZE, config.num_heads, config.head_dim
        self.layers = [
            tuple(model.xp.full(shape, np.nan) for _ in "kv")
            for _ in self.layers
        ]
        table = np.random.default_rng(0).permutation(pages)
        self.page_table = model.xp.asarray(table[None].astype(np.int32))

    def attend(self, layer, q, k, v, visible):
        return cuflash.forward_kvcache(
            q,
            *self.layers[layer],
            k_new=k,
            v_new=v,
            cache_seqlens=self.seqlen,
            page_table=self.page_table,
            **visible,
        )


class ForgetfulCache(Cache):
    """Loses the first of all keys, once there are 30."""

    def attend(self, layer, q, k, v, visible):
        n = self.seqlen + q.shape[1]
        return cuflash.forward_kvcache(
            q,
            *self.layers[layer],
            k_new=k,
            v_new=v,
            cache_seqlens=self.seqlen,
            window=(n - 1 - (n == 30), 0),
        )


def tiny_model(xp, seqlen):
    """Return a model that hardly ever repeats a token."""
    config = Config(
        num_layers=2,
        num_heads=2,
        head_dim=8,
        seqlen=seqlen,
        dtype=np.float64,
        attention_dtype=np.float64,
    )
    model = Transformer(config, 16, xp, seed=12)
    logits = np.random.default_rng(12).standard_normal((config.width, 16))
    model.p["logits"][:] = xp.asarray(logits)
    return model


def whole_pass(model, tokens):
    """Return the logits of each step, from one pass, and their bound."""
    seen = model.xp.asarray([PROMPT + tokens[:-1]])
    logits, saved = model.forward(seen)
    steps = to_numpy(logits)[0, len(PROMPT) - 1 :]
    return steps, model_bounds.logits(model, saved)


@pytest.mark.parametrize("cache", [Cache, PagedCache])
@pytest.mark.parametrize(
    ("backend", "steps"),
    [
        pytest.param(*x.values, steps, id=x.id, marks=x.marks)
        # Emulated: past two tiles of keys, and two pages.
        for x, steps in ((NUMPY, 2000), (EMULATED, 40), (CUPY, 2000))
    ],
)
def test_text_is_that_without_a_cache(backend, steps, cache):
    if backend.name == "cupy":
        import cupy as xp
    else:
        xp = np
    seqlen = len(PROMPT) + steps
    model = tiny_model(xp, seqlen)
    with backend.running(Case()):
        tokens, logits = generate(
            model, PROMPT, steps, greedy, cache(model, seqlen)
        )
        expected, bound = whole_pass(model, tokens)
    assert logits.shape == expected.shape == (steps, 16)
    assert_arrays_equal(
        expected.argmax(axis=-1), tokens, "expected.argmax(axis=-1)"
    )
    assert_within(logits, expected, 2 * bound, "logits", "with a cache")
    # What makes these assertions mean something.
    second, first = np.sort(expected, axis=-1)[:, -2:].T
    assert (first - second).min() > 2 * bound
    assert len(set(tokens)) > 8


def test_a_lost_key_exceeds_the_bound():
    model = tiny_model(np, 64)
    tokens, logits = generate(
        model, PROMPT, 59, greedy, ForgetfulCache(model, 64)
    )
    expected, bound = whole_pass(model, tokens)
    errors = np.abs(logits - expected).max(axis=-1)
    lost = 30 - len(PROMPT)
    assert errors[:lost].max() <= 2 * bound < errors[lost]


def test_text_beyond_the_model_is_refused():
    model = tiny_model(np, 8)
    cache = Cache(model, 20)
    extend(model, np.zeros((1, 8), int), cache)
    with pytest.raises(ValueError, match="8 positions"):
        extend(model, np.zeros((1, 1), int), cache)
