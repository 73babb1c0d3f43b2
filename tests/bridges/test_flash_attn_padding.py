"""bert_padding: between padded batches and packed sequences."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import int32, normal  # noqa: E402
from flash_attn_oracle import sequence, tolerance  # noqa: E402

from cuflash.flash_attn import flash_attn_varlen_qkvpacked_func  # noqa: E402
from cuflash.flash_attn.bert_padding import (  # noqa: E402
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_arrays_equal,
    assert_at_most,
)

pytestmark = pytest.mark.slow

MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_unpad_input(dtype):
    x = normal(3, 4, 2, 8)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    assert_arrays_equal(tokens, torch.cat([x[0, :2], x[1, 1:]]), "tokens")
    assert indices.tolist() == [0, 1, 5, 6, 7] and longest == 3
    assert_arrays_equal(cu_seqlens, int32(0, 2, 5, 5), "cu_seqlens")
    assert_arrays_equal(used, int32(2, 3, 0), "used")
    assert type(longest) is int


def test_unused_places_are_kept():
    x, unused = normal(3, 4, 8), torch.zeros_like(MASK)
    unused[0, 2] = unused[2, 0] = 1
    _, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8] and longest == 3
    assert_arrays_equal(cu_seqlens, int32(0, 3, 6, 7), "cu_seqlens")
    assert_arrays_equal(used, int32(2, 3, 0), "used")


def test_pad_input_is_the_inverse():
    x = normal(3, 4, 2, 8)
    tokens, indices, *_ = unpad_input(x, MASK)
    padded = pad_input(tokens, indices, 3, 4)
    assert_arrays_equal(padded, x * MASK[..., None, None], "padded")


def test_rows_of_several_sequences():
    x = normal(2, 6, 8)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = (
        unpad_input_for_concatenated_sequences(x, lengths)
    )
    assert_arrays_equal(tokens, torch.cat([x[0, :5], x[1]]), "tokens")
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert_arrays_equal(cu_seqlens, int32(0, 2, 5, 11), "cu_seqlens")
    assert longest == 6


def test_an_empty_batch():
    tokens, *_, longest, _ = unpad_input(normal(0, 4, 8), MASK[:0])
    assert tokens.shape == (0, 8) and longest == 0


def test_gradients():
    indices = torch.tensor([4, 0, 2])
    x, values = normal(5, 3, grad=True), normal(3, 2, grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda x: index_first_axis(x, indices), (x,))
    assert check(lambda x: index_put_first_axis(x, indices, 6), (values,))
    assert check(lambda x: index_first_axis_residual(x, indices), (x,))


def test_attention_of_a_padded_batch():
    """As models use it: unpad, attend, pad; each sequence by itself."""
    qkv = normal(3, 4, 3, 2, 8)
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, MASK)
    out = flash_attn_varlen_qkvpacked_func(
        tokens, cu_seqlens, longest, causal=True
    )
    padded = pad_input(out, indices, 3, 4)
    for b, row in enumerate(MASK.bool()):
        q, k, v = qkv[b, row].unbind(1)
        want, _ = sequence(q, k, v, causal=True)
        error = (padded[b, row] - want).abs()
        assert_at_most(error, tolerance(*qkv.unbind(2)), "error")
        assert_all(padded[b, ~row], 0, "padded[b, ~row]")
