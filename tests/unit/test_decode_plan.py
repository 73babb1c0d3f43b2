"""Which calls the decode kernel takes, and into how many parts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.plan import device_of_arch, plan
from cuflash.problem import Problem

H200 = replace(
    device_of_arch("sm_90a"), num_sms=132, shared_bytes=227 << 10,
    l2_bytes=50 << 20,
)  # fmt: skip
CALL = Problem("forward", "bfloat16", 1, 1, 8192, 32, 8, 128, 128, 0.125)


@pytest.mark.parametrize("changes", [
    {}, {"seqlen_q": 16}, {"causal": True}, {"dtype": "float16"},
    {"segment_ids": True, "dropout": 0.5}, {"head_dim": 256},
])  # fmt: skip
def test_few_queries_of_many_keys(changes):
    assert plan(replace(CALL, **changes), H200).family == "decode"


@pytest.mark.parametrize("changes", [
    {"seqlen_q": 17}, {"seqlen_k": 511}, {"block_k": 64},
    {"num_sequences": 3}, {"dtype": "float32"}, {"head_dim": 257},
])  # fmt: skip
def test_other_calls(changes):
    assert plan(replace(CALL, **changes), H200).family != "decode"


def test_little_shared_memory():
    """sm_86 has 99 KiB; two stages of four warps' keys need 128."""
    problem = replace(CALL, head_dim=256, head_dim_v=256)
    assert plan(problem, device_of_arch("sm_86")).family == "mma"


@given(
    batch=st.integers(1, 200),
    seqlen_k=st.integers(512, 100_000),
    num_sms=st.integers(1, 200),
)
def test_parts_have_a_tile_at_least(batch, seqlen_k, num_sms):
    problem = replace(CALL, batch=batch, seqlen_k=seqlen_k)
    decided = plan(problem, replace(H200, num_sms=num_sms))
    splits, tiles = decided.num_splits, -(-seqlen_k // decided.tile.block_k)
    assert 1 <= splits <= tiles
    assert decided.launches[0].blocks == batch * 8 * splits
    elements = {x.name: x.elements for x in decided.workspace}
    rows = batch * 32 * splits
    assert elements == (
        {"split_out": rows * 128, "split_lse": rows} if splits > 1 else {}
    )


@pytest.mark.parametrize(("seqlen_k", "blocks"), [(1024, 64), (8192, 128)])
def test_the_keys_of_one_sequence_fill_the_gpu(seqlen_k, blocks):
    """One block on each SM; of 1,024 keys there are 8 tiles a head."""
    problem = replace(CALL, seqlen_k=seqlen_k)
    assert plan(problem, H200).launches[0].blocks == blocks


def test_many_sequences_are_not_cut():
    problem = replace(CALL, batch=132, num_heads_q=64, num_heads_kv=16)
    assert plan(problem, H200).num_splits == 1
