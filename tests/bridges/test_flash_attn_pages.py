"""Packed queries over pages of keys, without a cache to append to."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import (  # noqa: E402
    assert_close,
    int32,
    offsets,
    packed_qkv,
    slopes,
)
from flash_attn_oracle import packed, tolerance  # noqa: E402

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.flash_attn import flash_attn_varlen_func  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

PAGE_SIZE = 4
SEQLENS_Q, SEQLENS_K = (3, 1, 2), (5, 8, 3)
TABLE = torch.tensor([[6, 2], [0, 5], [3, 9]], dtype=torch.int32)
OPTIONS = [
    {"causal": True},
    {"window_size": (2, 0), "softcap": 2.0},
    {"alibi_slopes": slopes(3, 4)},
]


@pytest.fixture
def tokens():
    """q, k and v, packed."""
    return packed_qkv(sum(SEQLENS_Q), sum(SEQLENS_K))


def pages_of(x):
    """The tokens in their pages; NaN where there is none."""
    pages = torch.full((7, PAGE_SIZE, *x.shape[1:]), torch.nan, dtype=x.dtype)
    for part, row in zip(x.split(SEQLENS_K), TABLE, strict=True):
        for t, token in enumerate(part):
            pages[row[t // PAGE_SIZE], t % PAGE_SIZE] = token
    return pages


@pytest.mark.parametrize("options", OPTIONS)
def test_out_and_lse(tokens, options):
    q, k, v = tokens
    out, lse, _ = flash_attn_varlen_func(
        q, pages_of(k), pages_of(v), offsets(SEQLENS_Q), offsets(SEQLENS_K),
        3, 8, block_table=TABLE, return_attn_probs=True, **options,
    )  # fmt: skip
    want_out, want_lse = packed(q, k, v, SEQLENS_Q, SEQLENS_K, **options)
    assert_close(out, want_out, tolerance(q, k, v, 8))
    assert_close(lse, want_lse, tolerance(q, k, v, 8))


def test_names_of_flash_attention_3(tokens):
    q, k, v = tokens
    given = (q, pages_of(k), pages_of(v), offsets(SEQLENS_Q))
    want = flash_attn_varlen_func(
        *given, offsets(SEQLENS_K), 3, 8, block_table=TABLE
    )
    got, _ = flash_attn_varlen_func(
        *given, None, 3, 8, page_table=TABLE, seqused_k=int32(*SEQLENS_K),
        num_splits=0, pack_gqa=True, return_softmax_lse=True,
    )  # fmt: skip
    assert_arrays_equal(got, want, "got")


def test_backward_raises_and_dropout_is_refused(tokens):
    q, k, v = tokens
    given = (
        pages_of(k), pages_of(v), offsets(SEQLENS_Q), offsets(SEQLENS_K), 3, 8,
    )  # fmt: skip
    trained = q.clone().requires_grad_()
    out = flash_attn_varlen_func(trained, *given, block_table=TABLE)
    assert_arrays_equal(
        out, flash_attn_varlen_func(q, *given, block_table=TABLE), "out"
    )
    with pytest.raises(UnsupportedError, match="no gradients, but q require"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match="dropout_p is 0.5 with block"):
        flash_attn_varlen_func(q, *given, 0.5, block_table=TABLE)
