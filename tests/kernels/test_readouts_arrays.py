"""Gradients of a user's arrays in readouts, exact: which pairs add to which.

All scores and lse are 0, so that weights are 1: with cotangents and slopes of
few bits, sums are integers that float32 holds.
"""

import numpy as np
import pytest

import cuflash
from helpers.backends import NumpyBackend, on_kernels
from helpers.compare import assert_arrays_equal
from helpers.data import Case
from helpers.dtypes import DTYPES, lse_dtype
from helpers.option_cases import KINDS

# Of each array another sum: all pairs of a tile, those of a query, a key, a
# distance, none.
SHAPES = {
    "head": (4,), "query": (2, 35), "key": (4, 81), "near": (170, 4),
    "pair": (2, 12),
}  # fmt: skip


def coded(score, b, h, i, j, *, head, query, key, near, pair):
    score = score + head[h] * (i % 3) + query[b, i // 2] * (j % 5 + 1)
    score = score + key[h, j] * (i % 4 + 1) + near[i - j + 89, h] * (j % 2)
    return score + pair[h % 2, (i * j) % 13]


def band(b, h, i, j):
    return (j <= i + 40) & (j > i - 50 - h)


CHOSEN = {"queries": [1, 5, 69, -65], "keys": [3, 80, 0, 3], "heads": [2, 2]}
# By name: the call, what it chooses, the shape of its cotangent.
CALLS = {
    "weights": (cuflash.weights_backward, CHOSEN, (2, 2, 4, 4)),
    "all": (cuflash.weights_backward, {}, (2, 4, 70, 81)),
    "sums": (cuflash.weight_sums_backward, {}, (2, 4, 81)),
    "maxima": (cuflash.weight_sums_backward, {"reduce": "max"}, (2, 4, 81)),
    "entropy": (cuflash.entropy_backward, {}, (2, 4, 70)),
}


def given_of(name, case):
    """The call's arrays and keywords, coded."""
    rng, dtype = np.random.default_rng(5), DTYPES[case.dtype]
    real = lse_dtype(dtype)
    function, asked, shape = CALLS[name]
    first = rng.integers(-3, 4, shape).astype(real)
    q, k = np.zeros((2, 70, 4, 16), dtype), np.zeros((2, 81, 2, 16), dtype)
    lse = np.zeros((2, 4, 70), real)
    asked = dict(asked)
    if case.offsets:
        first, q, k, lse = (x[0] for x in (first, q, k, lse))
    if name in ("sums", "maxima"):
        asked["queries"] = slice(3, 67)
        asked["row_weights"] = rng.integers(-2, 3, lse.shape).astype(real)
    return function, (first, q, k, lse), asked


def arrays_of(case):
    dtype = lse_dtype(DTYPES[case.dtype])
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def dmod_of(backend, case, name, **more):
    function, arrays, asked = given_of(name, case)
    asked |= {"score_mod": coded, "mask_mod": band, **more}
    if case.offsets:
        of_q, of_k = map(np.array, case.offsets)
        asked |= {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    for argument in {"row_weights", "cu_seqlens_q", "cu_seqlens_k"} & {*asked}:
        asked[argument] = backend.place(asked[argument])
    mods = {x: backend.place(y) for x, y in arrays_of(case).items()}
    backend.poison()
    with backend.running(case):
        *_, found = function(
            *map(backend.place, arrays), precision=case.precision,
            mod_arrays=mods, return_dmod=tuple(mods), **asked,
        )  # fmt: skip
    return {x: backend.fetch(y) for x, y in found.items()}


def check(backend, case, name, **more):
    got = dmod_of(backend, case, name, **more)
    want = dmod_of(NumpyBackend(), case, name)
    assert got.keys() == want.keys() == SHAPES.keys()
    for array in SHAPES:
        assert np.any(want[array]), array
        assert_arrays_equal(got[array], want[array], array)


# Tiles are a family's, columns a call's: each family, and each call.
TURNS = [
    *(("all", kind) for kind in KINDS),
    ("weights", "mma"), ("sums", "fma"), ("maxima", "mma"),
    ("entropy", "fma"),
]  # fmt: skip


@on_kernels
@pytest.mark.parametrize(("name", "kind"), TURNS)
def test_each_pair_adds_once(backend, name, kind):
    exact = TURNS.index((name, kind)) % 2 == 1
    check(backend, Case(**KINDS[kind]), name, deterministic=exact)


@on_kernels
@pytest.mark.parametrize("name", ["all", "weights"])
def test_pairs_of_packed_sequences_add_once(backend, name):
    """A sequence's tokens begin within a tile; one has no keys."""
    offsets = (0, 23, 40, 69), (0, 30, 30, 81)
    check(backend, Case(**KINDS["fma"], batch=1, offsets=offsets), name)
