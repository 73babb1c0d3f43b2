"""Slices, sizes and lists of block masks, as FlexAttention documents them."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from torch.nn.attention import flex_attention as theirs  # noqa: E402

import cuflash  # noqa: E402
from cuflash.torch import (  # noqa: E402
    create_block_mask,
    flex_attention,
    functions,
)
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = 3, 4, 40, 56
IDS = torch.arange(3 * 56).reshape(3, 56) * 7 % 5


def mod(b, h, i, j):
    return (i + h >= j) & (IDS[b, j] != 1)


def made(function=create_block_mask, sizes=SIZES):
    return function(mod, *sizes, device="cpu", BLOCK_SIZE=16)


def dense(mask, batch, heads):
    """Return which pairs are visible, by attention to unit vectors."""
    seqlen_q, seqlen_k = mask.seq_lengths
    shape = batch, heads, seqlen_k, seqlen_k
    q = torch.zeros(batch, heads, seqlen_q, 8)
    value = torch.eye(seqlen_k).expand(shape)
    out = flex_attention(q, torch.zeros(*shape[:3], 8), value, None, mask)
    return out > 0


WHOLE = mod(
    *torch.meshgrid(*map(torch.arange, SIZES), indexing="ij")
)  # fmt: skip
# By what is taken of batch, heads and queries.
INDICES = {
    "int": (1, 1, slice(None), slice(None)),
    "ints": ((2, -1), 2, 3, slice(None)),
    "slices": ((slice(1, 3), slice(0, 2)), slice(1, 3), slice(2), None),
    "steps": ((slice(None, None, 2), [3, 0]), [0, 2], [3, 0], None),
    "rows": ((slice(None), slice(None), 1), None, None, slice(16, 32)),
    "last": ((0, slice(None), slice(1, 3)), 0, None, slice(16, 40)),
    "tensor": (
        (slice(None), 0, torch.tensor([2, 0])[1:]), None, 0, slice(0, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_slices(name):
    index, *places = INDICES[name]
    mask, want = made()[index], WHOLE
    for axis, place in enumerate(places):
        place = slice(None) if place is None else place
        if isinstance(place, int):
            place = [place]
        want = want[(slice(None),) * axis + (place,)]
    assert mask.shape == tuple(want.shape) and mask.numel() == want.numel()
    assert_arrays_equal(dense(mask, *want.shape[:2]), want, name)


def test_rows_in_another_order_and_slices_of_slices():
    rows = [*range(32, 40), *range(16)]
    mask = made(sizes=(3, 4, 48, 56))[:, :, torch.tensor([2, 0])][1:, 2]
    q = torch.cat([torch.arange(32, 48), torch.arange(16)])
    grid = torch.meshgrid(
        torch.arange(1, 3), torch.tensor([2]), q, torch.arange(56),
        indexing="ij",
    )  # fmt: skip
    assert_arrays_equal(dense(mask, 2, 1), mod(*grid), "rows")
    assert len(rows) == 24  # of 40 queries the last block has 8
    assert made()[:, :, [0, 2]].seq_lengths == (24, 56)


def test_one_head_that_is_left_stands_for_any():
    assert_arrays_equal(
        dense(made()[1, 2], 3, 4), WHOLE[1:2, 2:3].expand(SIZES), "any"
    )


def test_what_programs_for_torch_assign_to_a_slice():
    mask = made()[:, :, 1]
    mask.mask_mod = lambda b, h, i, j: j <= i + 20
    mask.seq_lengths = (1, 56)
    assert mask.shape == (3, 4, 1, 56)
    assert_arrays_equal(
        dense(mask, 3, 4)[0, 0, 0], torch.arange(56) <= 20, "assigned"
    )


def test_what_was_chosen_goes_to_the_device_once():
    """As on a GPU: a device that is not the CPU."""
    mask = create_block_mask(lambda b, h, i, j: i + h >= b, *SIZES)
    q = torch.empty(3, 4, 40, 8, device="meta")
    for part in mask[1, ::2], mask[[0, 2], 3], mask[:, torch.tensor([1, -1])]:
        first, second = (
            functions.taken({"mask_mod": part}, {}, q).readable_arrays()
            for _ in range(2)
        )
        assert first and {x.device for x in first.values()} == {q.device}
        for name, x in first.items():  # a number is read as an array
            y = second[name]
            assert y is x or y._base is x._base is not None


@pytest.mark.parametrize("sizes", [SIZES, (3, 4, 48, 48)])
def test_lists_are_those_of_torch(sizes):
    ours, other = made(sizes=sizes), made(theirs.create_block_mask, sizes)
    assert ours.shape == other.shape and ours.numel() == other.numel()
    found = ours.as_tuple()
    names = [
        f"{full}{axis}_{what}"
        for axis in ("kv", "q") for full in ("", "full_")
        for what in ("num_blocks", "indices")
    ]  # fmt: skip
    for name, x in zip(names, found[2:10], strict=True):
        assert_arrays_equal(x, getattr(other, name), name)
    for flatten in True, False:  # what follows the lists, too
        got, want = ours.as_tuple(flatten), other.as_tuple(flatten)
        ends = slice(9 + flatten, None)
        assert got[: 1 + flatten] == want[: 1 + flatten]
        assert got[ends] == want[ends]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (3, "expected -3 to 2: it has 3 batch"),
        ((0, 0, torch.tensor([5])), "it has 3 blocks of queries"),
        (slice(2, 2), "takes none of 3 batch"),
        ("x", "expected an int, a slice or a tensor"),
        (1.5, "has dtype torch.float32, expected integers"),
        ([[0]], r"shape \(1, 1\), expected one axis"),
        ((0, 0, 0, 0), "by 4 indices, expected up to three"),
    ],
)
def test_errors(index, words):
    with pytest.raises(cuflash.CuflashError, match=words):
        made()[index]
