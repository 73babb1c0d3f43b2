"""Which calls the decode kernels take, and into how many parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.errors import DTypeError, UnsupportedError, ValueRangeError
from cuflash.plans import decode, decode_sm90
from cuflash.plans.plan import check, device_of_arch, plan
from cuflash.plans.tiles import Tile
from cuflash.request.problem import KVCache, Problem

H200 = replace(
    device_of_arch("sm_90a"), num_sms=132, shared_bytes=227 << 10,
    l2_bytes=50 << 20,
)  # fmt: skip
CALL = Problem("forward", "bfloat16", 1, 1, 8192, 32, 8, 128, 128, 0.125)


@pytest.mark.parametrize("changes", [
    {}, {"seqlen_q": 8}, {"causal": True}, {"dtype": "float16"},
    {"segment_ids": True, "dropout": 0.5}, {"head_dim": 256},
])  # fmt: skip
def test_few_queries_of_many_keys(changes):
    assert plan(replace(CALL, **changes), H200).family == "decode"


@pytest.mark.parametrize("changes", [
    {"seqlen_q": 9}, {"seqlen_q": 16}, {"seqlen_q": 128, "num_heads_kv": 32},
    {"seqlen_q": 33, "num_splits": 3}, {"seqlen_q": 16, "mask": True},
])  # fmt: skip
def test_more_queries_on_hopper(changes):
    problem = replace(CALL, **changes)
    assert plan(problem, H200).family == "decode_sm90"
    assert plan(problem, device_of_arch("sm_80")).family != "decode_sm90"


def test_enough_queries_fill_the_other_kernels():
    """The fewest of them that do, by the number of sequences."""
    long = replace(CALL, seqlen_q=2048)
    assert plan(long, H200).family == "sm90"
    assert plan(replace(CALL, seqlen_q=128), H200).family == "decode_sm90"


@pytest.mark.parametrize("changes", [
    {"seqlen_q": 17}, {"seqlen_k": 511}, {"block_k": 64},
    {"num_sequences": 3}, {"dtype": "float32"}, {"head_dim": 257},
])  # fmt: skip
def test_other_calls(changes):
    assert plan(replace(CALL, **changes), H200).family != "decode"


@pytest.mark.parametrize("tokens", [512, 1024, 4096])
@pytest.mark.parametrize("options", [{}, {"bias": "bfloat16"}])
def test_queries_of_their_own_sequence_take_the_other_kernels(tokens, options):
    for arch, family in (("sm_90a", "sm90"), ("sm_80", "sm80")):
        problem = replace(
            CALL, num_heads_q=16, seqlen_q=tokens, seqlen_k=tokens, **options
        )
        assert plan(problem, device_of_arch(arch)).family == family


ON_CUDA_CORES = [
    {"dtype": "float32"}, {"dtype": "float64"}, {"head_dim": 257},
    {"head_dim_v": 512}, {"dtype": "float32", "head_dim": 257},
    {"dtype": "float64", "seqlen_q": 2, "segment_ids": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", ON_CUDA_CORES)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a"])
def test_the_kernel_on_cuda_cores(changes, arch):
    problem = replace(CALL, **changes)
    decided = plan(problem, device_of_arch(arch))
    assert decided.family == "decode_simt"
    itemsize = 8 if problem.dtype == "float64" else 4
    widths = [x.itemsize for x in decided.workspace if x.name[:5] == "split"]
    assert widths == [itemsize] * 2


def test_sm_75_decodes_float16_on_tensor_cores():
    device = device_of_arch("sm_75")
    families = {"float16": "decode", "bfloat16": "decode_simt"}
    for dtype, family in families.items():
        assert plan(replace(CALL, dtype=dtype), device).family == family


@pytest.mark.parametrize("changes", [
    {"seqlen_q": 2049}, {"seqlen_k": 511}, {"block_q": 16},
    {"num_sequences": 3}, {"precision": "tf32x3"},
    {"seqlen_q": 33, "batch": 32, "num_heads_kv": 32},
    {"seqlen_q": 9, "segment_ids": True},
])  # fmt: skip
def test_other_calls_of_float32(changes):
    problem = replace(CALL, dtype="float32", **changes)
    assert not plan(problem, H200).family.startswith("decode")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("is_faster", "shape"),
    [
        (True, (1, 40, 8192, 32, 8, 128)),
        (True, (16, 9, 4096, 32, 8, 64)),
        (False, (16, 33, 2048, 32, 32, 64)),
    ],
)
def test_cuda_cores_have_the_measured_calls_that_they_win(
    dtype, is_faster, shape
):
    names = "batch seqlen_q seqlen_k num_heads_q num_heads_kv head_dim".split()
    sizes = dict(zip(names, shape, strict=True), head_dim_v=shape[-1])
    problem = replace(CALL, dtype=dtype, **sizes)
    decided = plan(problem, replace(H200, num_sms=132))
    assert (decided.family == "decode_simt") == is_faster


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seqlen_q", [8, 9, 20])
def test_more_rows_of_few_heads_on_cuda_cores(dtype, seqlen_q):
    """32 blocks of long kernels would leave 100 SMs idle."""
    problem = replace(CALL, dtype=dtype, seqlen_q=seqlen_q)
    assert plan(problem, H200).family == "decode_simt"
    wide = replace(problem, seqlen_q=9, head_dim=512, head_dim_v=512)
    assert not plan(wide, H200).family.startswith("decode")


@pytest.mark.parametrize("option", [{"softcap": 20.0}, {"mask": True}])
def test_options_of_many_heads_take_the_long_kernels(option):
    """A query more must not be faster. Up to 32 rows reading is the limit."""
    problem = replace(
        CALL, batch=4, num_heads_kv=32, seqlen_q=64, **option
    )  # fmt: skip
    for queries, hopper in ((32, "decode"), (64, "sm90"), (65, "sm90")):
        asked = replace(problem, seqlen_q=queries)
        assert plan(asked, H200).family == hopper
    few_heads = replace(problem, batch=1, num_heads_kv=4, seqlen_q=8)
    assert plan(few_heads, H200).family == "decode_sm90"


def test_parts_outside_a_window_cost_nothing():
    """64 rows: the long kernel reads each head's keys for 8 queries."""
    problem = replace(
        CALL, batch=16, num_heads_q=128, num_heads_kv=16, seqlen_q=8,
        seqlen_k=65536, window=(1000, None), causal=True,
    )  # fmt: skip
    assert plan(problem, H200).family == "decode_sm90"


def test_keys_that_a_window_hides_are_not_cut():
    """Each part writes rows, and the merge reads them."""
    problem = replace(
        CALL, batch=16, num_heads_q=128, num_heads_kv=32, seqlen_q=32,
        seqlen_k=65536, head_dim=64, head_dim_v=64, window=(1000, 0),
    )  # fmt: skip
    tile = Tile(128, 128, 0, 1)
    assert decode_sm90._num_splits(problem, H200, tile) == 1
    whole = replace(problem, batch=1, window=(None, None))
    assert decode_sm90._num_splits(whole, H200, tile) > 1


@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_longer_keys_search_no_parts_again(seqlen_q):
    """As keys grow by one with each call of `forward`."""
    for module in (decode, decode_sm90):
        module._best_splits.cache_clear()
    for tokens in range(8000, 8064):
        plan(replace(CALL, seqlen_q=seqlen_q, seqlen_k=tokens), H200)
    for module in (decode, decode_sm90):
        assert module._best_splits.cache_info().misses <= 4


def test_it_is_asked_for_by_name():
    for wanted in ("decode", "decode_simt"):
        assert plan(CALL, H200, wanted).family == wanted
    many = replace(CALL, seqlen_q=100, num_splits=2)
    assert plan(many, H200, "decode_simt").family == "decode_simt"


@given(
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    head_dim=st.integers(1, 576),
    head_dim_v=st.integers(1, 512),
    seqlen_q=st.integers(1, 4),
    options=st.booleans(),
)
def test_its_loads_cover_each_row(
    dtype, head_dim, head_dim_v, seqlen_q, options
):
    """And its rows are as many as those of a key head, if they fit."""
    problem = replace(
        CALL, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v,
        seqlen_q=seqlen_q, num_heads_kv=16, mask=options,
    )  # fmt: skip
    decided = plan(problem, device_of_arch("sm_80"), "decode_simt")
    known = dict(decided.kernels[0].constants)
    for length, name in ((head_dim, ""), (head_dim_v, "_V")):
        vector = known["V_VECTOR" if name else "K_VECTOR"]
        padded = known[f"HEAD_DIM{name}"]
        itemsize = {"float16": 2, "float32": 4, "float64": 8}[dtype]
        assert length % vector == 0 and vector * itemsize <= 16
        assert padded % (32 * vector) == 0
        assert length <= padded < length + 32 * vector
    assert known["BLOCK_K"] == known["WARP_KEYS"] * known["NUM_WARPS"]
    assert known["BLOCK_Q"] < 2 * 2 * seqlen_q
    if head_dim + head_dim_v <= 128:
        assert known["BLOCK_Q"] >= min(2 * seqlen_q, 8)


def test_little_shared_memory():
    """sm_86 has 99 KiB; two stages of four warps' keys need 128."""
    problem = replace(CALL, head_dim=256, head_dim_v=256)
    assert plan(problem, device_of_arch("sm_86")).family == "sm80"


@given(
    batch=st.integers(1, 200),
    seqlen_k=st.integers(512, 100_000),
    num_sms=st.integers(1, 200),
)
def test_parts_have_a_tile_at_least(batch, seqlen_k, num_sms):
    problem = replace(CALL, batch=batch, seqlen_k=seqlen_k)
    decided = plan(problem, replace(H200, num_sms=num_sms))
    splits, tile = decided.num_splits, decided.tile
    assert 1 <= splits <= -(-seqlen_k // tile.block_k)
    slots = batch * 8 * splits
    assert decided.launches[0].blocks == slots
    elements = {x.name: x.elements for x in decided.workspace}
    rows = slots * tile.block_q
    assert elements == ({
        "split_out": rows * 128, "split_lse": rows,
    } if splits > 1 else {})  # fmt: skip


@given(batch=st.integers(2, 200), num_sms=st.integers(2, 200))
def test_sequences_of_unknown_lengths_fill_the_gpu(batch, num_sms):
    """With two slots for each block: decode/parts.cuh."""
    cache = KVCache("bfloat16", 64, 100, max_pages=128, lengths=True)
    problem = replace(CALL, direction="kvcache", batch=batch, kvcache=cache)
    decided = plan(problem, replace(H200, num_sms=num_sms))
    blocks, tile = decided.launches[0].blocks, decided.tile
    constants = dict(decided.kernels[0].constants)
    assert blocks == num_sms * constants["BLOCKS_PER_SM"]
    elements = {x.name: x.elements for x in decided.workspace}
    rows = 2 * blocks * tile.block_q
    assert elements == {
        "split_out": rows * 128, "split_lse": rows
    }  # fmt: skip


@pytest.mark.parametrize("queries", [1, 8])
def test_one_sequence_of_unknown_length_has_the_parts_of_its_capacity(queries):
    """All its heads have as many keys; but a window needs balanced parts."""
    cache = KVCache("bfloat16", 64, 100, max_pages=128, lengths=True)
    known, unknown, window = (
        replace(
            CALL, direction="kvcache", batch=1, seqlen_q=queries, kvcache=x,
            window=y,
        )
        for x, y in (
            (replace(cache, lengths=False), (None, None)),
            (cache, (None, None)),
            (cache, (100, None)),
        )
    )  # fmt: skip
    plans = [plan(x, H200) for x in (known, unknown, window)]
    assert plans[0].num_splits == plans[1].num_splits
    balanced = [dict(x.kernels[0].constants)["BALANCED"] for x in plans]
    assert balanced == [False, False, True]


@pytest.mark.parametrize(("seqlen_k", "blocks"), [(1024, 64), (8192, 128)])
def test_the_keys_of_one_sequence_fill_the_gpu(seqlen_k, blocks):
    """One block on each SM; of 1,024 keys there are 8 tiles a head."""
    problem = replace(CALL, seqlen_k=seqlen_k)
    assert plan(problem, H200).launches[0].blocks == blocks


def test_many_sequences_are_not_cut():
    problem = replace(CALL, batch=132, num_heads_q=64, num_heads_kv=16)
    assert plan(problem, H200).num_splits == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("num_splits", [1, 7, 128])
def test_a_number_of_parts_is_kept(dtype, num_splits):
    """With a block for each part of each head, even an empty one."""
    problem = replace(CALL, dtype=dtype, num_splits=num_splits)
    decided = plan(problem, H200)
    assert decided.family.startswith("decode")
    assert decided.num_splits == num_splits
    assert decided.launches[0].blocks == 8 * num_splits


@given(
    dtype=st.sampled_from(["bfloat16", "float32", "float64"]),
    batch=st.integers(1, 500),
    seqlen_k=st.integers(0, 5000),
)
def test_its_tile_does_not_depend_on_the_batch(dtype, batch, seqlen_k):
    alone = replace(CALL, dtype=dtype, num_splits=2)
    problem = replace(alone, batch=batch, seqlen_k=seqlen_k)
    assert plan(problem, H200).tile == plan(alone, H200).tile


@pytest.mark.parametrize("changes", [
    {"dtype": "float32"}, {"dtype": "float64"}, {"head_dim": 257},
    {"dtype": "float32", "seqlen_q": 100}, {"seqlen_k": 10, "head_dim": 400},
])  # fmt: skip
def test_keys_are_split_for_all_dtypes_and_head_dims(changes):
    problem = replace(CALL, num_splits=2, **changes)
    check(problem)
    assert plan(problem, H200).family == "decode_simt"


@pytest.mark.parametrize("changes", [
    {"num_sequences": 3}, {"block_q": 64}, {"block_k": 64},
    {"dtype": "float32", "precision": "tf32x3"},
])  # fmt: skip
def test_calls_whose_keys_are_not_split(changes):
    problem = replace(CALL, num_splits=2, **changes)
    with pytest.raises(UnsupportedError, match="^num_splits is 2: keys are"):
        plan(problem, H200)
    with pytest.raises(UnsupportedError, match="^num_splits is 2: keys are"):
        check(problem)


def test_too_little_shared_memory_to_split():
    """The kernel on CUDA cores has no tiles of keys there."""
    problem = replace(CALL, num_splits=2, head_dim=256, head_dim_v=256)
    assert plan(problem, device_of_arch("sm_86")).family == "decode_simt"
    small = replace(device_of_arch("sm_86"), shared_bytes=1000)
    with pytest.raises(UnsupportedError, match="too little shared memory"):
        plan(problem, small)


@pytest.mark.parametrize("num_splits", [0, 129, -1])
def test_a_number_of_parts_that_none_can_merge(num_splits):
    q = np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(ValueRangeError, match="^num_splits is .* 1 to 128"):
        cuflash.forward(q, q, q, num_splits=num_splits)


def test_a_number_of_parts_is_an_int():
    q = np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(DTypeError, match="^num_splits is 2.0 of type float"):
        cuflash.forward(q, q, q, num_splits=2.0)
