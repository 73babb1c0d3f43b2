"""A padded model as people write it for flash-attn, against PyTorch's SDPA.

float64 throughout. Rounding of a few units of 2^-53, amplified by two layers
with weights of norm about 1, stays far below 2^-30; a wrong mask, position or
sequence shows in the first digits.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import normal  # noqa: E402

from cuflash.flash_attn import (  # noqa: E402
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cuflash.flash_attn.bert_padding import (  # noqa: E402
    pad_input,
    unpad_input,
)
from cuflash.flash_attn.layers.rotary import RotaryEmbedding  # noqa: E402

pytestmark = pytest.mark.slow

HEADS, HEAD_DIM, SEQLEN = 2, 8, 6
WIDTH = HEADS * HEAD_DIM
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6, [1, 1, 0, 0, 0, 0]])
TOLERANCE = 2.0**-30


def by_flash_attn(qkv, causal):
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, MASK)
    out = flash_attn_varlen_qkvpacked_func(
        tokens, cu_seqlens, longest, causal=causal
    )
    return pad_input(out, indices, *MASK.shape)


def by_torch(qkv, causal):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    visible = MASK[:, None, None].bool()
    if causal:
        visible = visible & torch.ones(SEQLEN, SEQLEN).tril().bool()
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q, k, v, attn_mask=visible).transpose(1, 2)
    return out * MASK[..., None, None]


class Model(torch.nn.Module):
    """Two residual layers of attention with rotated queries and keys."""

    def __init__(self):
        super().__init__()
        weights = [
            (normal(3 * WIDTH, WIDTH, seed=i), normal(WIDTH, WIDTH, seed=9))
            for i in range(2)
        ]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(x / WIDTH**0.5)
            for pair in weights
            for x in pair
        )
        self.rotary = RotaryEmbedding(HEAD_DIM)

    def forward(self, x, attend, first=0):
        """`attend` maps qkv and the layer to out."""
        for layer in (0, 1):
            w_qkv, w_out = self.weights[2 * layer : 2 * layer + 2]
            qkv = torch.nn.functional.linear(x, w_qkv)
            qkv = qkv.unflatten(-1, (3, HEADS, HEAD_DIM))
            qkv = self.rotary(qkv, seqlen_offset=first, max_seqlen=SEQLEN)
            out = attend(qkv, layer).flatten(-2)
            x = x + torch.nn.functional.linear(out, w_out)
        return x


@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients(causal):
    model, x = Model(), normal(3, SEQLEN, WIDTH, seed=5)
    results = []
    for attend in (by_flash_attn, by_torch):
        out = model(x, lambda qkv, _, f=attend: f(qkv, causal))
        loss = (out * MASK[..., None]).square().sum()
        gradients = torch.autograd.grad(loss, [*model.weights])
        results.append([out * MASK[..., None], *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_tokens_one_by_one():
    """With a cache for each layer, the results are those of all at once."""
    model, x = Model(), normal(1, SEQLEN, WIDTH, seed=5)
    caches = torch.zeros(2, 2, 1, SEQLEN, HEADS, HEAD_DIM, dtype=x.dtype)

    def attend(qkv, layer):
        q, k, v = qkv.unbind(2)
        return flash_attn_with_kvcache(
            q, *caches[layer], k, v, cache_seqlens=first, causal=True
        )

    outs = []
    for first in range(SEQLEN):
        outs.append(model(x[:, first : first + 1], attend, first))
    first = 0
    want = model(x, attend)
    torch.testing.assert_close(
        torch.cat(outs, 1), want, rtol=0, atol=TOLERANCE
    )
