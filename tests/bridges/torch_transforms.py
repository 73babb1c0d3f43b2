"""Derivatives by torch.func, of attention and of dense attention."""

from functools import partial

import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp
from torch_data import tensors
from torch_dense import dense

import cuflash.torch

SIZES = {
    "seqlen_q": 2,
    "seqlen_k": 3,
    "num_heads_q": 2,
    "num_heads_kv": 1,
    "head_dim": 2,
    "head_dim_v": 2,
}
OPTIONS = ["none", "softcap", "bias", "bias of each", "sink"]


def case(name, **sizes):
    """Return arrays by name, and the other arguments."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    named = dict(zip("qkv", tensors(**SIZES | sizes), strict=True))
    if name == "bias":
        named["bias"] = normal(2, 3)
    if name == "bias of each":
        named["bias"] = normal(sizes.get("batch", 2), 2, 2, 3)
    if name == "sink":
        named["sink"] = normal(2)
    return named, {"softcap": 1.5} if name == "softcap" else {}


def total(function, *inputs):
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
    return (out.flatten() ** 2 * weights).sum()


def derivative(transform, function, num, *inputs):
    """All of one transform's derivatives at a point."""
    wrt = tuple(range(num))
    scalar = partial(total, function)
    if transform == "jvp":
        tangents = tuple(x.cos() for x in inputs)
        return jvp(function, inputs, tangents)
    if transform == "vjp":
        out, pull = vjp(function, *inputs)
        return pull(out.cos())
    return {
        "grad": grad(scalar, wrt),
        "jacfwd": jacfwd(function, wrt),
        "jacrev": jacrev(function, wrt),
        "forward over reverse": hessian(scalar, wrt),
        "reverse over reverse": jacrev(jacrev(scalar, wrt), wrt),
        "reverse over forward": jacrev(jacfwd(scalar, wrt), wrt),
    }[transform](*inputs)


FIRST = ["jvp", "vjp", "grad", "jacfwd", "jacrev"]
SECOND = [
    "forward over reverse", "reverse over reverse", "reverse over forward"
]  # fmt: skip
TRANSFORMS = [*FIRST, *SECOND]


def both(name, **sizes):
    """Return cuflash's attention, dense attention, and the inputs of both."""
    named, others = case(name, **sizes)

    def ours(*inputs):
        given = dict(zip(named, inputs, strict=True))
        return cuflash.torch.attention(**given, **others)

    def theirs(*inputs):
        return dense(**dict(zip(named, inputs, strict=True)), **others)

    return ours, theirs, tuple(named.values())


def assert_close(got, expected):
    """Some hundred operations on numbers of size 10: 500 * 10 * 2^-53."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
