"""Tensors in torch's own layout, its math backend, and both's rounding."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

L, S, E, EV = 5, 7, 8, 6  # as torch's documentation names them
torchs = torch.nn.functional.scaled_dot_product_attention  # tests replace it
HALF_ULP = torch.finfo(torch.float64).eps / 2


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype)


def inputs(*lead, heads_kv=None, seqlen_q=L, seqlen_k=S):
    """Return query, key and value; the last of `lead` counts heads."""
    of_keys = lead if heads_kv is None else (*lead[:-1], heads_kv)
    return [
        normal(*lead, seqlen_q, E),
        normal(*of_keys, seqlen_k, E, seed=1),
        normal(*of_keys, seqlen_k, EV, seed=2),
    ]


def math(*tensors, **options):
    """torch's own function, by its plain operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(*tensors, **options)


def results(function, tensors, attn_mask=None, **options):
    """Return out, and the gradients of its sum with weights."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.detach().requires_grad_()
        leaves.append(attn_mask)
    out = function(*leaves[:3], attn_mask=attn_mask, **options)
    dout = normal(*out.shape, seed=3)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def bounds(query, key, value, attn_mask=None, **_):
    """Return the error of out, and of a gradient, that rounding can make.

    To first order, of two computations: a sum of n terms is off by n half
    ulps of the sum of their absolute values, which for a product of rows is
    at most that of their lengths. Weights of a row sum to 1.
    """
    u, scale, rows = HALF_ULP, E**-0.5, query[..., 0].numel()
    q, k, v = (x.norm(dim=-1).max().item() for x in (query, key, value))
    dout = 6.0  # the length of rows of normal numbers, of some hundred
    of_score = (
        (E + 2) * u * (q * k * scale + (4.0 if attn_mask is not None else 0.0))
    )
    of_weights = 2 * of_score + (S + 4) * u  # relative
    dp = dout * v  # D is no larger
    of_row = dp * (4 * of_weights + 2 * (S + EV) * u)  # of dS, summed
    of_rows = (
        rows * (of_row + 2 * dp * rows * u) * max(1, scale * q, scale * k)
    )
    of_dv = rows * dout * (of_weights + rows * u)
    return 2 * v * (of_weights + S * u), 2 * max(of_rows, of_dv)
