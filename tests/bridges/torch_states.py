"""Results over parts of the keys, as tensors, for `merge_states`."""

import numpy as np
import torch

from helpers.dtypes import PRECISION

SHAPE = (2, 5, 3, 4)  # batch, seqlen, heads, head_dim_v


def states(parts, dtype=torch.float64, *, blind=0.3, seed=0):
    """Return out_a, lse_a, out_b, ...; some rows see no key.

    The out of such a row is NaN: it must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, seqlen, heads, _ = SHAPE
    wide = torch.promote_types(dtype, torch.float32)
    given = []
    for _ in range(parts):
        out = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        lse = torch.randn(
            (batch, heads, seqlen), generator=generator, dtype=torch.float64
        )
        hidden = torch.rand(lse.shape, generator=generator) < blind
        lse[hidden] = -torch.inf
        out[hidden.mT] = torch.nan
        given += [out.to(dtype), lse.to(wide)]
    return given


def leaves(tensors):
    """Return copies that require grad."""
    return [x.detach().clone().requires_grad_() for x in tensors]


def results(function, given):
    """Return out, lse and the gradients of their sum with weights."""
    given = leaves(given)
    out, lse = function(*given)
    # lse is -inf of rows that see no key.
    weights = (
        torch.arange(x.numel(), device=x.device).view(x.shape)
        for x in (out, lse)
    )
    there = torch.where(lse == -np.inf, 0, lse)
    loss = sum(
        (x * w).sum() for x, w in zip((out, there), weights, strict=True)
    )
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, given)


def assert_close(got, expected):
    """Within what the sum of a few parts of size 5 rounds.

    Each of three weights and products errs by some 20 e, relative to numbers
    of up to 5 in out and lse, 100 in gradients.
    """
    for x, y in zip(got, expected, strict=True):
        unit, _, e = PRECISION[str(x.dtype).removeprefix("torch.")]
        size = 1 + y.double().nan_to_num(neginf=0).abs().amax()
        torch.testing.assert_close(
            x, y, rtol=0, atol=float(size) * (60 * e + 2 * unit)
        )
