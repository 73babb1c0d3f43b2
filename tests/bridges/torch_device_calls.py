"""Calls that tests of a GPU and of an emulated device share."""

import torch
from torch_data import tensors

import cuflash.torch


def inputs_on(device, dtype=torch.bfloat16, requires_grad=True, **sizes):
    sizes = {**device.sizes, **sizes}
    return device.put(tensors(dtype, requires_grad=requires_grad, **sizes))


def results(inputs, **given):
    """Return out, lse and the gradients of their sums with weights."""
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    dout, dlse = (torch.ones_like(x) * 0.5 for x in (out, lse))
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    return out.detach(), lse.detach(), *gradients


def kvcache():
    """Return the arguments of a step of decoding, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        x = torch.randn(shape, generator=generator)
        return x.to(torch.bfloat16)

    return {
        "q": normal(2, 1, 8, 64),
        "k_cache": normal(2, 700, 2, 64),
        "v_cache": normal(2, 700, 2, 64),
        "k_new": normal(2, 1, 2, 64),
        "v_new": normal(2, 1, 2, 64),
        "cache_seqlens": torch.tensor([600, 5], dtype=torch.int32),
    }


def squares(q, k, v):
    """A scalar of a call, for compilers."""
    out = cuflash.torch.attention(q * 2, k, v, causal=True)
    return (out * 2).float().square().sum()


def assert_near_compiled(got, expected):
    """Within what Inductor's gradients of `squares` may differ by."""
    for x, y in zip(got, expected, strict=True):
        error = (x - y).float().abs().max()
        # Inductor leaves out roundings to bfloat16 between operations.
        assert error <= 4 * 2.0**-7 * y.float().abs().max()
