"""The largest scores of `flex_attention`, beside what torch computes."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch")

from flex_cases import MASKS, SCORES, SEQLEN, inputs  # noqa: E402
from torch._higher_order_ops import (  # noqa: E402
    flex_attention as operator,
)
from torch.nn.attention import flex_attention as theirs  # noqa: E402

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.torch import create_block_mask, flex_attention  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_allclose, assert_bitwise  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = pytest.mark.slow

# Scores below 2^6 are sums of 8 products and a few terms, in float32.
ATOL = 2.0**-24 * 2.0**6 * 16


def asked(**more):
    return theirs.AuxRequest(max_scores=True, **more)


def mask_of(name="causal"):
    """Its first row sees nothing, as in no block: -inf."""

    def shifted(b, h, q_idx, kv_idx):
        return MASKS[name](b, h, q_idx, kv_idx) & (q_idx > 0)

    return create_block_mask(shifted, None, None, SEQLEN, SEQLEN)


def largest(function, *args, **more):
    found = function(*args, **more)[1].max_scores
    assert not found.requires_grad
    return found.numpy()


def as_torchs(score, mask, *qkv):
    """What torch computes; on a CPU its function does not return it."""
    sizes = None, None, SEQLEN, SEQLEN
    mask = theirs.create_block_mask(mask, *sizes, device="cpu").as_tuple()
    scale = qkv[0].shape[-1] ** -0.5
    return operator(*qkv, score, mask, scale, {})[2].numpy() * math.log(2)


@pytest.mark.parametrize("score", [None, "alibi", "hidden"])
@pytest.mark.parametrize("mask", ["nothing", "causal", "documents"])
def test_as_torchs(score, mask):
    query, key, value = (x.detach() for x in inputs(torch.float32))
    qkv = query, key[:, :2], value[:, :2]
    score_mod = SCORES[score]()[0] if score else lambda s, *_: s
    mask = mask_of(mask)
    expected = as_torchs(score_mod, mask.mask_mod, *qkv)
    got = largest(
        flex_attention, *qkv, score_mod, mask, enable_gqa=True,
        return_aux=asked(),
    )  # fmt: skip
    assert got[..., 0].max() == -np.inf and got.dtype == "float32"
    assert_allclose(got, expected, "largest", atol=ATOL)


def test_beside_lse_and_gradients():
    qkv = inputs()
    aux = asked(lse=True)
    out, found = flex_attention(*qkv, None, mask_of(), return_aux=aux)
    alone = flex_attention(*qkv, None, mask_of(), return_lse=True)
    for got, expected in zip((out, found.lse), alone, strict=True):
        assert_bitwise(got.detach().numpy(), expected.detach().numpy(), "")
    seeds = [torch.ones_like(x) for x in alone]
    gradients = (
        torch.autograd.grad(x, qkv, seeds) for x in ((out, found.lse), alone)
    )
    for got, expected in zip(*gradients, strict=True):
        assert_bitwise(got.numpy(), expected.numpy(), "gradient")
    assert found.max_scores.dtype == torch.float64
    above = found.max_scores - found.lse
    assert above[..., 1:].max() <= 0


@pytest.mark.parametrize("with_mask", [False, True])
def test_compiled(with_mask):
    qkv, mask = inputs(), mask_of() if with_mask else None

    def call(query, key, value):
        out, aux = flex_attention(
            query, key, value, None, mask, return_aux=asked()
        )
        return out, aux.max_scores

    expected = call(*qkv)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = compiled(*qkv)
    for got, x in zip(found, expected, strict=True):
        assert_bitwise(got.detach().numpy(), x.detach().numpy(), "compiled")
    found[0].sum().backward()
    assert qkv[0].grad is not None and not found[1].requires_grad


@needs_compiler
def test_on_a_device():
    given = [x.detach() for x in inputs(torch.float32)]
    expected = largest(
        flex_attention, *given, None, mask_of(), return_aux=asked()
    )
    with emulated_torch.active("sm_80"):
        for leaf in False, True:
            given[0].requires_grad_(leaf)
            got = largest(
                flex_attention, *given, None, mask_of(),
                return_aux=asked(lse=leaf),
            )  # fmt: skip
            assert_allclose(got, expected, "largest", atol=ATOL)


def test_not_in_transforms():
    query, key, value = (x.detach() for x in inputs())

    def call(x):
        return flex_attention(x, key, value, return_aux=asked())[0].sum()

    with pytest.raises(UnsupportedError, match="max_scores"):
        torch.func.grad(call)(query)
