"""Scores to which a multiple of the key's number is added, tile by tile."""

import numpy as np
import pytest

from cuflash.expressions.affine import affine
from cuflash.expressions.reals import in_reals
from cuflash.plans.tiles import Tile
from expression_strategies import Drawn
from helpers.backends import on_kernels
from helpers.data import Emulation
from helpers.expression_calls import Pairs, given_of, mod_arrays, recorded
from helpers.expression_kernels import Graphs, evaluate
from helpers.host_compiler import needs_compiler
from helpers.variants import Variant, case_of, check_forward

QUERIES, KEYS, BLOCK_Q, BLOCK_K = 24, 30, 4, 5

# A score, and what must have one sign in a tile.
SCORES = {
    "score - table[h, 0] * abs(q_idx - kv_idx)": lambda q, k: [q - k],
    "score + (kv_idx - q_idx) * w": lambda q, k: [],
    "kv_idx * 0.5 + score - q_idx * 3": lambda q, k: [],
    "score + 1.0 - abs(kv_idx * 2 - q_idx - 6) / 4.0": (
        lambda q, k: [2 * k - q - 6]
    ),
    "score - np.maximum(q_idx - kv_idx, 7) * 0.125": (
        lambda q, k: [q - k - 7]
    ),
    "score + np.minimum(kv_idx, 11) - abs(q_idx - 3.5 - kv_idx)": (
        lambda q, k: [k - 11, q - 3.5 - k]
    ),
}  # fmt: skip
NEVER = (
    "score", "score + q_idx", "score * 2.0 + kv_idx", "kv_idx - score",
    "score + curve[kv_idx]", "score + q_idx * kv_idx",
    "score + np.floor(kv_idx * 0.5)", "score + kv_idx // 2",
    "score + np.where(q_idx > kv_idx, 1.0, 2.0)", "score + n * kv_idx",
    "np.maximum(score + kv_idx, 3.0)", "score - 2.0**(kv_idx - q_idx)",
    "score + abs(abs(q_idx - kv_idx) - 5)",
)  # fmt: skip


def graph_of(text, values):
    return recorded(Drawn("score_mod", text), values)


def test_other_scores_are_not():
    values = mod_arrays(1)
    for text in NEVER:
        assert affine(in_reals(graph_of(text, values))) is None, text


def tiles():
    return np.array([
        (i, i + BLOCK_Q - 1, j, j + BLOCK_K - 1)
        for i in range(0, QUERIES, BLOCK_Q)
        for j in range(0, KEYS, BLOCK_K)
    ])  # fmt: skip


def is_decided(edges, tile):
    """Whether each edge is above 0 for all pairs, or below."""
    q, k = np.ogrid[tile[0] : tile[1] + 1, tile[2] : tile[3] + 1]
    return all((x > 0).all() or (x < 0).all() for x in edges(q, k))


@needs_compiler
def test_where_the_key_decides():
    """Multiples of 1/8: nothing is rounded."""
    values = mod_arrays(1) | {"w": 0.75}
    given, *own = given_of(values)
    pairs = Pairs.drawn(1, QUERIES, KEYS, np.float32)
    graphs = [Graphs(graph_of(text, values)) for text in SCORES]
    kinds = tuple(kind for _, kind in given.arrays)
    none = np.zeros((QUERIES, KEYS))
    found = evaluate(graphs, kinds, *own, pairs, none, tiles(), "float", True)
    for (text, edges), x in zip(SCORES.items(), found, strict=True):
        want = [is_decided(edges, tile) for tile in tiles()]
        assert x.affine.tolist() == want, text


def _slopes(score, b, h, q_idx, kv_idx, *, slope):
    return score - slope[h] * np.abs(q_idx - kv_idx)


def _rising(score, b, h, q_idx, kv_idx, *, slope):
    return score + slope[h] * (kv_idx - q_idx) + 0.25


def _numbers(shape):
    return {"slope": np.array([0.5, 0.03, 2.0, -0.01], np.float32)[: shape[1]]}


def _bias_of_distance(slope, shape):
    _, h, q, k = np.ogrid[tuple(map(slice, shape))]
    return np.broadcast_to(-slope.astype(np.float64)[h] * abs(q - k), shape)


def _bias_of_key(slope, shape):
    _, h, q, k = np.ogrid[tuple(map(slice, shape))]
    return np.broadcast_to(slope.astype(np.float64)[h] * (k - q) + 0.25, shape)


VARIANTS = {
    "slopes": Variant(_slopes, None, _numbers, _bias_of_distance),
    "rising": Variant(_rising, None, _numbers, _bias_of_key),
}


@on_kernels
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"dropout": 0.2}])
def test_hopper(backend, name, more):
    """Tiles before the diagonal, on it, after it."""
    on = Emulation("sm_90a", num_sms=1, forward_tile=Tile(
        128, 64, 12, num_stages=2))  # fmt: skip
    case = case_of(300, 330, 16, batch=1, on=on, **more)
    check_forward(backend, case, VARIANTS[name])
