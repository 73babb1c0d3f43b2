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
