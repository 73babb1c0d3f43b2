"""A Llama of six layers, whose attention is a function that is passed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

LAYERS, HIDDEN, HEADS, HEADS_KV, HEAD_DIM = 6, 1024, 16, 4, 64
INTERMEDIATE, VOCABULARY = 2816, 32000

# (q, k, v), each (batch, seqlen, heads, head_dim), to the same.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Attention and SwiGLU, each after a norm and beside a residual."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.RMSNorm(HIDDEN)
        width = (HEADS + 2 * HEADS_KV) * HEAD_DIM
        self.qkv = nn.Linear(HIDDEN, width, bias=False)
        self.proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, seqlen, -1, HEAD_DIM)
        q, k, v = qkv.split([HEADS, HEADS_KV, HEADS_KV], dim=2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.attention(q, k, v)
        x = x + self.proj(out.reshape(batch, seqlen, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotary position embedding by halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )


class Llama(nn.Module):
    """The loss of predicting each next token."""

    def __init__(self, attention: Attention, seqlen: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        powers = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        angles = torch.outer(torch.arange(seqlen), 10000.0**-powers)
        self.register_buffer("cos", angles.cos()[None, :, None])
        self.register_buffer("sin", angles.sin()[None, :, None])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
