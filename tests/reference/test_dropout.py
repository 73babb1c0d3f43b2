"""Philox's words, and the pairs that dropout keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.reference.dropout import Dropout, philox, threshold
from helpers.compare import assert_arrays_equal

ONES = 0xFFFFFFFF
# Known answers for philox4x32-10 of the authors' Random123 (kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_known_words(counter, key, words):
    assert " ".join(f"{int(x):08x}" for x in philox(counter, key)) == words


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_factors_are_of_the_known_words(counter, key, words):
    """A pair's word, to the bit: the seed's words, and each index, tell."""
    chunk, query, head, batch = counter
    seed = key[0] + (key[1] << 32)
    for i, word in enumerate(int(x, 16) for x in words.split()):
        pair = np.array([query]), np.array([4 * chunk + i])
        for above, kept in ((0, True), (1, False)):
            probability = min((word + above) / 2**32, 1 - 2.0**-32)
            drop = Dropout(probability, seed, batch, head)
            kept |= word == ONES
            assert (drop.factors(*pair) != 0).item() == kept


# Around the edges of words and of their signs.
EDGES = [x + i for x in (2**31, 2**32, 2**63) for i in (-1, 0, 1)]
SEEDS = [0, 1, *EDGES, 2**64 - 1]


def word_of(pair, seed):
    """A pair's word, by whole numbers of any size."""
    (query, key), multipliers = pair, (0xD2511F53, 0xCD9E8D57)
    c, k = [key // 4, query, 2, 3], [seed % 2**32, seed // 2**32]
    for _ in range(10):
        a, b = multipliers[0] * c[0], multipliers[1] * c[2]
        c = [b // 2**32 ^ c[1] ^ k[0], b % 2**32,
             a // 2**32 ^ c[3] ^ k[1], a % 2**32]  # fmt: skip
        steps = 0x9E3779B9, 0xBB67AE85
        k = [(x + y) % 2**32 for x, y in zip(k, steps, strict=True)]
    return c[key % 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_bits_of_the_seed_count(seed):
    query, key = np.arange(3), np.arange(9)
    kept = Dropout(0.5, seed, 3, 2).factors(query, key) != 0
    want = [[word_of((i, j), seed) >= 2**31 for j in key.tolist()]
            for i in query.tolist()]  # fmt: skip
    assert_arrays_equal(kept, want, "kept")


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


@given(tokens, tokens, st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_a_pair_s_factor_depends_on_the_pair_alone(query, key, seed, head):
    query, key = np.array(query), np.array(key)
    dropout = Dropout(0.5, seed, 3, head)
    factors = dropout.factors(query, key)
    for i in range(len(query)):
        for j in range(len(key)):
            one = dropout.factors(query[i : i + 1], key[j : j + 1])
            assert one.item() == factors[i, j]


def test_heads_and_batches_differ():
    heads = np.arange(4)
    factors = Dropout(0.5, 1, heads[:, None], heads).factors(heads, heads)
    assert factors.shape == (4, 4, 4, 4)
    assert len({x.tobytes() for x in factors.reshape(16, 16)}) == 16


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.99])
def test_share_of_dropped_pairs(probability):
    tokens = np.arange(1000)
    factors = Dropout(probability, 7).factors(tokens, tokens)
    dropped = (factors == 0).mean()
    # Five standard deviations of a mean of 10^6.
    assert abs(dropped - probability) <= 5e-3 * np.sqrt(probability)
    kept = factors[factors != 0]
    assert_arrays_equal(kept, 1 / (1 - probability), "kept")


def test_threshold_of_halves_is_exact():
    assert [threshold(p) for p in (0.0, 0.5, 0.75)] == [0, 2**31, 3 * 2**30]
