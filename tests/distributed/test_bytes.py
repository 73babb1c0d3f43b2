"""A rank sends as many bytes as the reference counts."""

import numpy as np
import pytest

from cuflash import distributed
from cuflash.reference.context_parallel import Heads, Sharded, bytes_sent

HEADS = Heads(4, 2, 8, element_bytes=4)


def sent(size, seqlen, layout, ulysses=1, **mask):
    """Bytes that each rank sends, forward and backward."""
    rng = np.random.default_rng(0)
    q, k = (
        rng.standard_normal((1, seqlen // size, heads, 8), np.float32)
        for heads in (HEADS.num_heads_q, HEADS.num_heads_kv)
    )

    def of_rank(group):
        given = {"group": group, "layout": layout, "ulysses": ulysses, **mask}
        counts = [group.bytes_sent]
        results = distributed.forward(q, k, k, return_lse=True, **given)
        counts.append(group.bytes_sent)
        distributed.backward(q, q, k, k, *results, **given)
        counts.append(group.bytes_sent)
        return np.diff(counts).tolist()

    return distributed.run_threads(size, of_rank)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [(None, None), (8, None), (40, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_ring_sends_what_others_see(layout, window, causal, size):
    shared = Sharded(size, 40 * size, layout, causal, window)
    expected = [
        [bytes_sent(shared, HEADS, rank, way) for way in (False, True)]
        for rank in range(size)
    ]
    got = sent(size, 40 * size, layout, causal=causal, window=window)
    assert got == expected


def test_ranks_that_nobody_sees_are_not_sent():
    """A window of 8 of 40 tokens: from each rank to the next, but the last."""
    got = sent(4, 160, "contiguous", causal=True, window=(8, None))
    assert [x[0] for x in got] == [HEADS.key_bytes(8)] * 3 + [0]


def test_zigzag_sends_three_quarters():
    """Later ranks need the first of two chunks alone."""
    got = sent(4, 160, "zigzag", causal=True)
    assert sum(x[0] for x in got) == 4 * 3 * HEADS.key_bytes(40) * 3 // 4


def test_all_to_all_sends_each_array_once():
    """All but its own half: forward q, k, v, out and lse."""
    got = sent(2, 80, "zigzag", ulysses=2, causal=True)
    rows = 40 * (4 + 2 + 2 + 4) * 8 * 4 + 40 * 4 * 4
    back = 40 * (4 + 4 + 2 + 2 + 4 + 4 + 2 + 2) * 8 * 4 + 40 * 4 * 4
    assert got == [[rows // 2, back // 2]] * 2
