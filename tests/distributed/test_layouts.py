"""Cutting whole arrays into the parts of ranks, and joining them."""

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.reference.context_parallel import Sharded
from helpers.compare import assert_elements
from helpers.dtypes import DTYPES

layouts = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
OFFSETS = [0, 12, 12, 24, 60]


@layouts
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [None, 2])
def test_parts_join_to_the_whole(layout, size, dtype, axis):
    shape = (2, 12, 3, 2) if axis is None else (2, 3, 12)
    whole = np.arange(144).reshape(shape if axis is None else (4, 3, 12))
    whole = whole.astype(DTYPES[dtype])
    parts = [
        distributed.shard(whole, r, size, layout=layout, axis=axis)
        for r in range(size)
    ]
    joined = distributed.unshard(parts, layout=layout, axis=axis)
    assert joined.dtype == whole.dtype
    assert_elements(joined, whole, "joined")


@layouts
@pytest.mark.parametrize("count", [1, 40])  # few slices, and by index
def test_packed_sequences_are_cut_one_by_one(layout, count):
    offsets = np.arange(count + 1) * 8
    whole = np.arange(offsets[-1] * 2).reshape(-1, 2)
    parts = [
        distributed.shard(whole, r, 2, layout=layout, cu_seqlens=offsets)
        for r in range(2)
    ]
    own = [distributed.shard(x, 1, 2, layout=layout) for x in np.split(
        whole, count
    )]  # fmt: skip
    assert_elements(parts[1], np.concatenate(own), "parts[1]")
    joined = distributed.unshard(parts, layout=layout, cu_seqlens=offsets)
    assert_elements(joined, whole, "joined")


@layouts
def test_positions_are_those_of_the_reference(layout):
    for rank in range(3):
        got = distributed.positions(rank, 3, 24, layout=layout)
        want = Sharded(3, 24, layout).positions(rank)
        assert got.tolist() == want.tolist()


def test_positions_start_anew_in_each_sequence():
    got = distributed.positions(0, 3, cu_seqlens=OFFSETS)
    assert got.tolist() == [0, 1, 10, 11] * 2 + [*range(6), *range(30, 36)]


def test_rotary_embedding_of_a_part():
    """By positions, it is the part of the whole's."""
    x = np.random.default_rng(0).standard_normal((1, 12, 2, 4))
    angles = np.outer(np.arange(12), [1.0, 0.1])
    tables = np.cos(angles), np.sin(angles)
    whole = cuflash.apply_rotary(x, *tables)
    at = distributed.positions(1, 2, 12)
    part = cuflash.apply_rotary(
        distributed.shard(x, 1, 2), *tables, positions=at[None]
    )
    assert_elements(part, distributed.shard(whole, 1, 2), "part")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seqlen": 10}, "a multiple of 4: layout 'zigzag'"),
        ({"seqlen": 10, "layout": "contiguous", "size": 3}, "multiple of 3"),
        ({"seqlen": 8, "layout": "striped"}, "'striped', expected one of"),
        ({"cu_seqlens": [0, 4, 6]}, "sequence 1 has 2 tokens"),
        ({"cu_seqlens": [0, 4, 2]}, "do not decrease"),
        ({"cu_seqlens": [[0]]}, "expected offsets"),
        ({}, "either seqlen or cu_seqlens"),
        ({"seqlen": 8, "rank": 2}, "rank is 2, expected 0 to 1"),
    ],
)
def test_what_cannot_be_cut(arguments, words):
    arguments = {"rank": 0, "size": 2, **arguments}
    with pytest.raises(cuflash.CuflashError, match=words):
        distributed.positions(**arguments)


def test_an_array_that_is_not_as_long_as_its_sequences():
    with pytest.raises(cuflash.ShapeError, match="has 9 tokens, expected 8"):
        distributed.shard(np.zeros((9, 1)), 0, 2, cu_seqlens=[0, 8])


Q = np.zeros((1, 8, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: distributed.unshard([Q, Q[:, :4]]), cuflash.ShapeError,
         "call unshard once for q and once for k"),
        (lambda: distributed.unshard([]), cuflash.ShapeError,
         "parts is empty"),
        (lambda: distributed.unshard(Q), cuflash.DTypeError,
         r"expected a list of arrays.*unshard\(\[part_0, part_1\]\)"),
        (lambda: distributed.unshard([[1]]), cuflash.DTypeError,
         r"parts\[0\] is of type list"),
        (lambda: distributed.shard([Q], 0, 2), cuflash.DTypeError,
         r"array is of type list.*shard\(q, rank, size\) for each array"),
    ],
)  # fmt: skip
def test_what_is_no_array(call, error, said):
    with pytest.raises(error, match=said):
        call()
