"""The blocks of all ranks are the visible pairs, each once."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from cuflash.distributed import layouts, schedule
from cuflash.reference import context_parallel
from cuflash.reference.context_parallel import Sharded

bounds = st.none() | st.integers(0, 9)


@st.composite
def masks(draw, packed=None):
    size = draw(st.integers(1, 6))
    layout = draw(st.sampled_from(layouts.LAYOUTS))
    count = layouts.num_chunks(size, layout)
    packed = draw(st.booleans()) if packed is None else packed
    most = 3 if packed else 1
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=most))
    of_keys = draw(
        st.just(lengths)
        | st.lists(
            st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)
        )
    )
    offsets = (tuple(np.cumsum([0, *x]) * count) for x in (lengths, of_keys))
    return schedule.Mask(
        size, layout, draw(st.booleans()), (draw(bounds), draw(bounds)),
        *(tuple(map(int, x)) for x in offsets), packed,
    )  # fmt: skip


def tokens(mask, offsets, rank):
    """(sequence, position) of a rank's tokens, in chunk order."""
    parts = schedule.in_chunk_order(mask, offsets, rank)
    return [(x.sequence, i) for x in parts for i in x.positions]


def is_visible(i, j, causal, window):
    left, right = window
    return (
        (not causal or j <= i)
        and (left is None or j >= i - left)
        and (right is None or j <= i + right)
    )


def visible_pairs(mask, rank_q, rank_k):
    lengths = [np.diff(x) for x in (mask.offsets_q, mask.offsets_k)]
    shift = lengths[1] - lengths[0]
    return {
        (a, b)
        for a, (s, i) in enumerate(tokens(mask, mask.offsets_q, rank_q))
        for b, (t, j) in enumerate(tokens(mask, mask.offsets_k, rank_k))
        if s == t and is_visible(i + shift[s], j, mask.causal, mask.window)
    }


def pairs_of(block):
    """What a call computes, with its mask aligned at the end."""
    cu_q = block.cu_seqlens_q or (0, len(block.queries))
    cu_k = block.cu_seqlens_k or (0, len(block.keys))
    for s in range(len(cu_q) - 1):
        queries = block.queries[cu_q[s] : cu_q[s + 1]]
        keys = block.keys[cu_k[s] : cu_k[s + 1]]
        shift = len(keys) - len(queries)
        for a, i in enumerate(queries):
            for b, j in enumerate(keys):
                if is_visible(a + shift, b, block.causal, block.window):
                    yield i, j


def blocks_of(mask):
    for rank_q in range(mask.size):
        for rank_k in range(mask.size):
            yield rank_q, rank_k, schedule.blocks(mask, rank_q, rank_k)


# Former failures: keys of sequences that have no queries.
KEYS_ALONE = [
    schedule.Mask(size, "zigzag", False, (None, None), of_q, of_k, True)
    for size, of_q, of_k in (
        (1, (0, 0, 0, 2), (0, 0, 2, 2)),
        (2, (0, 4, 4, 8, 8), (0, 4, 12, 16, 20)),
    )
]


def on_masks(test):
    """Run a test on drawn masks, and on former failures."""
    for mask in KEYS_ALONE:
        test = example(mask)(test)
    return given(masks())(test)


@on_masks
def test_each_visible_pair_is_computed_once(mask):
    for rank_q, rank_k, blocks in blocks_of(mask):
        computed = [pair for block in blocks for pair in pairs_of(block)]
        assert len(computed) == len(set(computed))
        assert set(computed) == visible_pairs(mask, rank_q, rank_k)


@on_masks
def test_each_needed_key_is_seen_and_each_seen_key_needed(mask):
    for rank_q, rank_k, _ in blocks_of(mask):
        needed = schedule.needed_keys(mask, rank_q, rank_k)
        seen = {j for _, j in visible_pairs(mask, rank_q, rank_k)}
        assert {j for keys in needed for j in keys} == seen


@on_masks
def test_bounds_of_blocks_are_a_calls(mask):
    for *_, blocks in blocks_of(mask):
        for block in blocks:
            assert all(x is None or x >= 0 for x in block.window)
            assert len(block.queries) and len(block.keys)


@given(masks(packed=False))
def test_the_reference_counts_the_same(mask):
    mask = replace(mask, offsets_k=mask.offsets_q)
    shared = Sharded(
        mask.size, mask.offsets_q[-1], mask.layout, mask.causal, mask.window
    )
    for rank in range(mask.size):
        for step, counted in enumerate(shared.steps(rank)):
            source = (rank - step) % mask.size
            pairs = visible_pairs(mask, rank, source)
            needed = schedule.needed_keys(mask, rank, source)
            assert counted.source == source
            assert counted.pairs == len(pairs)
            if step:
                assert counted.keys == sum(map(len, needed))


def test_a_causal_zigzag_step_is_one_block():
    """Of half the work of all queries and all keys."""
    mask = schedule.Mask(
        4, "zigzag", True, (None, None), (0, 64), (0, 64), False
    )
    for rank_q, rank_k, blocks in blocks_of(mask):
        (block,) = blocks
        if rank_q != rank_k:
            assert len(block.queries) * len(block.keys) == 16 * 16 // 2
            assert not block.causal


def test_efficiency_is_one_on_one_rank_and_falls_with_slow_links():
    heads = context_parallel.Heads()
    rates = {"flops_rate": 1e15, "link_rate": 1e30}
    alone = context_parallel.predict(Sharded(1, 64), heads, **rates)
    assert alone.efficiency == 1 and alone.exposed == 0
    shared = Sharded(8, 4096, causal=True)
    for backward in (False, True):
        fast = context_parallel.predict(
            shared, heads, backward=backward, **rates
        )
        slow = context_parallel.predict(
            shared, heads, backward=backward, flops_rate=1e15, link_rate=1e9
        )
        assert slow.efficiency < fast.efficiency <= 1 + 1e-9
