"""flash_attn_varlen_func against the oracle, sequence by sequence."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import (  # noqa: E402
    assert_close,
    int32,
    normal,
    offsets,
    packed_qkv,
    slopes,
)
from flash_attn_oracle import (  # noqa: E402
    packed,
    tolerance,
    tolerance_of_gradients,
)

from cuflash.flash_attn import flash_attn_varlen_func  # noqa: E402
from helpers.compare import assert_all, assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

# A sequence without queries, one without keys, one with more of either.
SEQLENS_Q, SEQLENS_K = (3, 0, 6, 2), (5, 4, 2, 0)
LONGEST = 6
TABLES = (offsets(SEQLENS_Q), offsets(SEQLENS_K), LONGEST, LONGEST)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "slopes": {"alibi_slopes": slopes(4)},
    "slopes of each sequence": {
        "alibi_slopes": slopes(4, 4),
        "causal": True,
        "softcap": 2.0,
    },
}


def tensors(**how):
    return packed_qkv(sum(SEQLENS_Q), sum(SEQLENS_K), **how)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_out_and_lse(options):
    q, k, v = tensors()
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *TABLES, **options, return_attn_probs=True
    )
    want_out, want_lse = packed(q, k, v, SEQLENS_Q, SEQLENS_K, **options)
    assert lse.shape == (4, sum(SEQLENS_Q))
    assert_close(out, want_out, tolerance(q, k, v, LONGEST))
    assert_close(lse, want_lse, tolerance(q, k, v, LONGEST))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options):
    inputs = tensors(grad=True)
    out = flash_attn_varlen_func(*inputs, *TABLES, **options)
    want, _ = packed(*inputs, SEQLENS_Q, SEQLENS_K, **options)
    dout = normal(*out.shape, seed=5)
    got = torch.autograd.grad(out, inputs, dout)
    atol = tolerance_of_gradients(*inputs, dout, LONGEST)
    for x, y in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
        assert_close(x, y, atol)


def test_a_longest_sequence_in_a_tensor():
    q, k, v = tensors()
    got = flash_attn_varlen_func(q, k, v, *TABLES[:2], torch.tensor(6), 6)
    assert_arrays_equal(got, flash_attn_varlen_func(q, k, v, *TABLES), "got")


def used(x, seqlens):
    """The first tokens of each sequence, and none of the others."""
    parts = zip(x.split(SEQLENS_K), seqlens, strict=True)
    return torch.cat([part[:n] for part, n in parts])


def test_keys_of_which_some_are_used():
    inputs = tensors(grad=True)
    out = flash_attn_varlen_func(
        *inputs, *TABLES, causal=True, seqused_k=int32(4, 4, 1, 0)
    )
    q, k, v = inputs
    want, _ = packed(
        q, *(used(x, (4, 4, 1, 0)) for x in (k, v)), SEQLENS_Q, (4, 4, 1, 0),
        causal=True,
    )  # fmt: skip
    assert_close(out, want, tolerance(*inputs))
    dout = normal(*out.shape, seed=5)
    got = torch.autograd.grad(out, inputs, dout)
    atol = tolerance_of_gradients(*inputs, dout)
    for x, y in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
        assert_close(x, y, atol)


def test_no_key_and_no_sequence():
    q, k, v = packed_qkv(2, 0)
    none = offsets([0])
    out = flash_attn_varlen_func(
        q, k, v, offsets([2]), none, 2, 0, seqused_k=int32(0)
    )
    assert_all(out, 0, "out")
    empty = flash_attn_varlen_func(
        *packed_qkv(0, 0), int32(0), int32(0), 0, 0, seqused_k=int32()
    )
    assert empty.shape == (0, 4, 8)
