"""Tensors and comparisons for the tests of `cuflash.flash_attn`."""

import torch


def normal(*shape, seed=0, dtype=torch.float64, grad=False):
    """Normal numbers that depend on the shape and the seed only."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def qkv(seqlen_q, seqlen_k, heads=4, heads_k=2, head_dim=8, batch=2, **how):
    """q, k, v in flash-attn's layout."""
    return (
        normal(batch, seqlen_q, heads, head_dim, seed=1, **how),
        normal(batch, seqlen_k, heads_k, head_dim, seed=2, **how),
        normal(batch, seqlen_k, heads_k, head_dim, seed=3, **how),
    )


def packed_qkv(total_q, total_k, heads=4, heads_k=2, head_dim=8, **how):
    """The same for packed sequences."""
    return (
        normal(total_q, heads, head_dim, seed=1, **how),
        normal(total_k, heads_k, head_dim, seed=2, **how),
        normal(total_k, heads_k, head_dim, seed=3, **how),
    )


def offsets(seqlens):
    """cu_seqlens."""
    ends = torch.tensor([0, *seqlens]).cumsum(0)
    return ends.to(torch.int32)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def slopes(*shape):
    """Slopes of ALiBi, at most 1."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(*shape, generator=generator)


def assert_close(got, want, tolerance):
    """Equal where infinite, elsewhere within an absolute tolerance."""
    assert got.shape == want.shape
    torch.testing.assert_close(
        got.double(), want.double(), rtol=0, atol=tolerance
    )
