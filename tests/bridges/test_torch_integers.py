"""Offsets, ids, lengths and positions of any integer dtype, as tensors."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

import numpy as np  # noqa: E402
from torch_data import assert_equal, packed_tensors, tensors  # noqa: E402

import cuflash.torch  # noqa: E402
from cuflash import flash_attn  # noqa: E402
from cuflash.torch import apply_rotary, attention, forward_kvcache  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

KINDS = [torch.int64, torch.uint8, torch.int16, torch.uint64]
Q, K, V = tensors(torch.float32, head_dim_v=8)
TABLES = torch.ones(9, 2), torch.zeros(9, 2)


def offsets(kind):
    cu = [torch.tensor(x).to(kind) for x in ([0, 2, 5], [0, 4, 7])]
    return attention(Q[0], K[0], V[0], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])


def ids(kind):
    q, k = ((torch.arange(n) // 3).expand(2, n).to(kind) for n in (5, 7))
    return attention(Q, K, V, segment_ids_q=q, segment_ids_k=k)


def lengths(kind):
    lengths = torch.tensor([3, 6]).to(kind)
    return forward_kvcache(Q, K, V, cache_seqlens=lengths)


def pages(kind):
    table = torch.tensor([[1], [0]]).to(kind)
    return forward_kvcache(Q, K, V, cache_seqlens=7, page_table=table)


def positions(kind):
    return apply_rotary(Q, *TABLES, positions=torch.arange(5).to(kind))


CALLS = [offsets, ids, lengths, pages, positions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_any_integer_dtype(call, kind):
    assert_arrays_equal(call(kind), call(torch.int32), "call(kind)")


@pytest.mark.parametrize("call", CALLS)
def test_compiled(call):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert_arrays_equal(
        compiled(torch.int64), call(torch.int32), "compiled(torch.int64)"
    )


@pytest.mark.parametrize("call", CALLS)
def test_other_dtypes_name_the_cure(call):
    with pytest.raises(TypeError, match="expected an integer dtype: convert"):
        call(torch.float32)


@pytest.mark.parametrize("length", [np.array(3), torch.tensor(3), np.int16(3)])
def test_one_length_for_all(length):
    expected = forward_kvcache(Q, K, V, cache_seqlens=3)
    got = forward_kvcache(Q, K, V, cache_seqlens=length)
    assert_arrays_equal(got, expected, "got")


def test_a_length_that_is_no_integer():
    with pytest.raises(TypeError, match=r"pass int\(cache_seqlens\)"):
        cuflash.torch.forward_kvcache(Q, K, V, cache_seqlens=3.0)


def test_gradients_of_packed_sequences():
    inputs, given = packed_tensors(torch.float32, requires_grad=True)
    wide = {name: x.long() for name, x in given.items()}
    got, expected = (
        torch.autograd.grad(attention(*inputs, **x).sum(), inputs)
        for x in (wide, given)
    )
    assert_equal(got, expected)


def test_pages_of_flash_attn():
    lengths, pages = torch.tensor([3, 6]), torch.tensor([[1], [0]])
    got, expected = (
        flash_attn.flash_attn_with_kvcache(
            Q, K, V, cache_seqlens=x, block_table=y
        )
        for x, y in ((lengths, pages), (lengths.int(), pages.int()))
    )
    assert_equal([got], [expected])
