"""A small transformer in array code, its gradients written out by hand.

Attention and its gradients are calls of cuflash; everything else is here. In
comments, B is the batch, T the tokens, C the channels (num_heads * head_dim)
and V the size of the vocabulary; dx is the gradient of the loss with respect
to x, and xp is numpy or cupy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import cuflash


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    seqlen: int = 64
    batch: int = 16
    steps: int = 500
    peak_rate: float = 4e-3
    # Everything but attention is computed in `dtype`.
    dtype: type = np.float32
    attention_dtype: type = np.float32
    # A module or object with cuflash's `forward` and `backward`.
    attention: object = cuflash
    # The lengths at which time and memory are compared.
    long_seqlens: tuple = (512, 1024, 2048)

    @property
    def width(self):
        return self.num_heads * self.head_dim


def to_numpy(x):
    return x.get() if hasattr(x, "get") else x


# ---- Layers, each followed by its gradient ----


def rows(x):
    """Flatten the leading axes: (B, T, C) -> (B * T, C)."""
    return x.reshape(-1, x.shape[-1])


def norm(x, gain):
    """y = gain * x / rms(x), the root mean square over channels.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    inverse = ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5
    return x * inverse * gain, (x, inverse)


def norm_backward(dy, gain, saved):
    x, inverse = saved
    dgain = rows(dy * x * inverse).sum(axis=0)
    dn = dy * gain
    along_x = (dn * x).mean(axis=-1, keepdims=True)
    return inverse * (dn - x * inverse**2 * along_x), dgain


def mlp(x, w_in, w_out):
    """y = relu(x W_in)^2 W_out."""
    hidden = (x @ w_in).clip(0, None)
    return (hidden * hidden) @ w_out, (x, hidden)


def mlp_backward(dy, w_in, w_out, saved):
    x, hidden = saved
    dw_out = rows(hidden * hidden).T @ rows(dy)
    dhidden = 2 * hidden * (dy @ w_out.T)
    dw_in = rows(x).T @ rows(dhidden)
    return dhidden @ w_in.T, dw_in, dw_out


def project(x, w_qkv, config):
    """Return Q, K and V, (B, T, num_heads, head_dim).

    They are views of one array; cuflash reads them without copies.
    """
    shape = (*x.shape[:2], 3, config.num_heads, config.head_dim)
    qkv = (x @ w_qkv).astype(config.attention_dtype, copy=False)
    return tuple(qkv.reshape(shape)[:, :, i] for i in range(3))


def attention(x, w_qkv, w_out, config):
    """y = softmax(Q K^T / sqrt(head_dim)) V W_out with a causal mask."""
    q, k, v = project(x, w_qkv, config)
    out, lse = config.attention.forward(q, k, v, causal=True, return_lse=True)
    joined = out.reshape(x.shape).astype(x.dtype, copy=False)
    return joined @ w_out, (x, q, k, v, out, lse)


def attention_backward(dy, w_qkv, w_out, saved, xp, config):
    x, q, k, v, out, lse = saved
    joined = out.reshape(x.shape).astype(x.dtype, copy=False)
    dw_out = rows(joined).T @ rows(dy)
    dout = (dy @ w_out.T).reshape(out.shape).astype(out.dtype, copy=False)
    grads = config.attention.backward(dout, q, k, v, out, lse, causal=True)
    # (B, T, 3, num_heads, head_dim), and the last three axes as one.
    dqkv = xp.stack([g.astype(x.dtype, copy=False) for g in grads], axis=2)
    dqkv = dqkv.reshape(*x.shape[:2], -1)
    dw_qkv = rows(x).T @ rows(dqkv)
    return dqkv @ w_qkv.T, dw_qkv, dw_out


def cross_entropy(logits, one_hot, xp):
    """Return mean -log(probability of the next token), and dlogits.

    Rows of zeros in one_hot, whose next token is not asked for, count nothing.
    """
    asked = one_hot.sum(axis=-1, keepdims=True)
    count = asked.sum()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = xp.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    right = (shifted * one_hot).sum(axis=-1, keepdims=True)
    loss = (asked * xp.log(total) - right).sum() / count
    return loss, (asked * weights / total - one_hot) / count


# ---- The model ----


def waves(config):
    """Initial position embeddings: sines and cosines of many wavelengths.

    "n characters back" is then the same rotation at every position, so heads
    quickly learn to attend to the previous character.
    """
    lengths = np.geomspace(3, 2 * config.seqlen, config.width // 2)
    angles = 2 * math.pi * np.arange(config.seqlen)[:, None] / lengths
    return 0.5 * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class Transformer:
    """Embeddings, blocks of attention and MLP, and a projection to logits.

    All parameters are views of one flat array, and their gradients of
    another, so the optimizer is a few lines on two vectors.
    """

    def __init__(self, config, vocabulary_size, xp, seed=0):
        self.config, self.xp = config, xp
        self.vocabulary_size = vocabulary_size
        width = config.width
        # Name -> shape and initial standard deviation. Matrices that add to
        # the residual stream start small, and the logits start at 0, so the
        # first loss is ln(V), that of a uniform guess.
        plan = {
            "embed": ((vocabulary_size, width), 0.5),
            "position": ((config.seqlen, width), 0.0),
            "norm": ((width,), None),
            "logits": ((width, vocabulary_size), 0.0),
        }
        inner = width**-0.5
        outer = inner / math.sqrt(2 * config.num_layers)
        for i in range(config.num_layers):
            plan[f"{i}.norm1"] = ((width,), None)
            plan[f"{i}.qkv"] = ((width, 3 * width), inner)
            plan[f"{i}.out"] = ((width, width), outer)
            plan[f"{i}.norm2"] = ((width,), None)
            plan[f"{i}.mlp_in"] = ((width, 4 * width), inner)
            plan[f"{i}.mlp_out"] = ((4 * width, width), outer / 2)

        size = sum(math.prod(shape) for shape, _ in plan.values())
        self.values = xp.empty(size, dtype=config.dtype)
        self.gradient = xp.zeros(size, dtype=config.dtype)
        self.p, self.g = {}, {}
        rng = np.random.default_rng(seed)
        start = 0
        for name, (shape, spread) in plan.items():
            part = slice(start, start + math.prod(shape))
            self.p[name] = self.values[part].reshape(shape)
            self.g[name] = self.gradient[part].reshape(shape)
            if spread is None:
                self.p[name][:] = 1
            else:
                first = spread * rng.standard_normal(shape)
                self.p[name][:] = xp.asarray(first.astype(config.dtype))
            start = part.stop
        self.p["position"][:] = xp.asarray(waves(config).astype(config.dtype))

    def forward(self, tokens):
        """Return logits (B, T, V), and arrays for the backward pass."""
        p = self.p
        x = p["embed"][tokens] + p["position"][: tokens.shape[1]]
        saved = {}
        for i in range(self.config.num_layers):
            n, saved[f"{i}.norm1"] = norm(x, p[f"{i}.norm1"])
            y, saved[f"{i}.attention"] = attention(
                n, p[f"{i}.qkv"], p[f"{i}.out"], self.config
            )
            x = x + y
            n, saved[f"{i}.norm2"] = norm(x, p[f"{i}.norm2"])
            y, saved[f"{i}.mlp"] = mlp(n, p[f"{i}.mlp_in"], p[f"{i}.mlp_out"])
            x = x + y
        n, saved["norm"] = norm(x, p["norm"])
        saved["last"] = n
        return n @ p["logits"], saved

    def backward(self, dlogits, tokens, saved):
        """Fill self.g: the forward pass in reverse."""
        p, g = self.p, self.g
        g["logits"][:] = rows(saved["last"]).T @ rows(dlogits)
        dn = dlogits @ p["logits"].T
        dx, g["norm"][:] = norm_backward(dn, p["norm"], saved["norm"])
        for i in reversed(range(self.config.num_layers)):
            dn, g[f"{i}.mlp_in"][:], g[f"{i}.mlp_out"][:] = mlp_backward(
                dx, p[f"{i}.mlp_in"], p[f"{i}.mlp_out"], saved[f"{i}.mlp"]
            )
            dy, g[f"{i}.norm2"][:] = norm_backward(
                dn, p[f"{i}.norm2"], saved[f"{i}.norm2"]
            )
            dx = dx + dy
            dn, g[f"{i}.qkv"][:], g[f"{i}.out"][:] = attention_backward(
                dx,
                p[f"{i}.qkv"],
                p[f"{i}.out"],
                saved[f"{i}.attention"],
                self.xp,
                self.config,
            )
            dy, g[f"{i}.norm1"][:] = norm_backward(
                dn, p[f"{i}.norm1"], saved[f"{i}.norm1"]
            )
            dx = dx + dy
        g["position"][: tokens.shape[1]] = dx.sum(axis=0)
        g["embed"][:] = self.one_hot(tokens).T @ rows(dx)

    def one_hot(self, tokens):
        """Return (B * T, V): 1 in the column of each row's token, if any."""
        column = self.xp.arange(self.vocabulary_size)
        return (tokens.reshape(-1, 1) == column).astype(self.config.dtype)

    def loss(self, tokens, targets, with_gradient=False):
        """Return the mean loss of a batch; with_gradient also fills self.g."""
        tokens = self.xp.asarray(tokens)
        targets = self.one_hot(self.xp.asarray(targets))
        logits, saved = self.forward(tokens)
        loss, dlogits = cross_entropy(rows(logits), targets, self.xp)
        if with_gradient:
            self.backward(dlogits.reshape(logits.shape), tokens, saved)
        return float(loss)
