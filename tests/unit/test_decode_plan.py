"""Which calls the decode kernel takes, and into how many parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.errors import DTypeError, UnsupportedError, ValueRangeError
from cuflash.plan import check, device_of_arch, plan
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


def test_a_number_of_parts_is_kept():
    assert plan(replace(CALL, num_splits=7), H200).num_splits == 7
    assert plan(replace(CALL, num_splits=128), H200).num_splits == 64


@given(batch=st.integers(1, 500), seqlen_k=st.integers(0, 5000))
def test_its_tile_does_not_depend_on_the_batch(batch, seqlen_k):
    problem = replace(CALL, batch=batch, seqlen_k=seqlen_k, num_splits=2)
    alone = replace(CALL, num_splits=2)
    assert plan(problem, H200).tile == plan(alone, H200).tile


@pytest.mark.parametrize("changes", [
    {"dtype": "float32"}, {"head_dim": 257}, {"num_sequences": 3},
    {"block_q": 64},
])  # fmt: skip
def test_calls_whose_keys_are_not_split(changes):
    problem = replace(CALL, num_splits=2, **changes)
    with pytest.raises(UnsupportedError, match="^num_splits is 2: keys are"):
        plan(problem, H200)
    with pytest.raises(UnsupportedError, match="^num_splits is 2: keys are"):
        check(problem)


def test_too_little_shared_memory_to_split():
    problem = replace(CALL, num_splits=2, head_dim=256, head_dim_v=256)
    with pytest.raises(UnsupportedError, match="too little shared memory"):
        plan(problem, device_of_arch("sm_86"))


@pytest.mark.parametrize("num_splits", [0, 129, -1])
def test_a_number_of_parts_that_none_can_merge(num_splits):
    q = np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(ValueRangeError, match="^num_splits is .* 1 to 128"):
        cuflash.forward(q, q, q, num_splits=num_splits)


def test_a_number_of_parts_is_an_int():
    q = np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(DTypeError, match="^num_splits is 2.0 of type float"):
        cuflash.forward(q, q, q, num_splits=2.0)
