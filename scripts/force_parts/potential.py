r"""A potential of atoms by attention, its forces, and their training.

Attention with q_i = (r_i, 1) and k_j = a (r_j, -|r_j|^2 / 2) has the scores
a (|r_i|^2 - |r_i - r_j|^2) / 2. So for each head, of a width 1 / sqrt(a),

    u_i = lse_i - a |r_i|^2 / 2      is the logarithm of the density at atom i,
                                     a sum of Gaussians around all atoms, and
    t_i = a |out_i - r_i|^2          with v_j = r_j says how far its
                                     neighbours' mean is from it.

Neither changes if all atoms are moved or turned, and a network of one hidden
layer makes an energy of them:

    E = sum_i w2 . tanh(x_i w1 + b1),   x_i = (u_i, t_i) of all heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Parameters = dict[str, np.ndarray]


def new_parameters(heads: int, hidden: int, seed: int) -> Parameters:
    """Widths from 0.3 to 1.5, and small random weights."""
    rng = np.random.default_rng(seed)
    widths = np.geomspace(0.3, 1.5, heads)
    return {
        "log_a": -2 * np.log(widths),
        "w1": rng.standard_normal((2 * heads, hidden)) / np.sqrt(2 * heads),
        "b1": np.zeros(hidden),
        "w2": rng.standard_normal(hidden) / np.sqrt(hidden),
    }


@dataclass
class Inputs:
    """Attention's inputs for positions (batch, atoms, 3)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def of(cls, r: np.ndarray, a: np.ndarray) -> Inputs:
        """At positions r."""
        ones = np.ones_like(r[..., :1])
        half = -(r**2).sum(-1, keepdims=True) / 2
        return cls._by_head(
            np.concatenate([r, ones], -1), np.concatenate([r, half], -1), r, a
        )

    @classmethod
    def tangents(cls, r: np.ndarray, s: np.ndarray, a: np.ndarray) -> Inputs:
        """Their velocities if r has the velocity s."""
        zeros = np.zeros_like(r[..., :1])
        half = -(r * s).sum(-1, keepdims=True)
        return cls._by_head(
            np.concatenate([s, zeros], -1), np.concatenate([s, half], -1), s, a
        )

    @classmethod
    def _by_head(
        cls, q: np.ndarray, k: np.ndarray, v: np.ndarray, a: np.ndarray
    ) -> Inputs:
        ones = np.ones_like(a)[:, None]
        q, k, v = (
            x[:, :, None] * y
            for x, y in ((q, ones), (k, a[:, None]), (v, ones))
        )
        return cls(q, k, v)


def positions_of(
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    r: np.ndarray,
    a: np.ndarray,
) -> np.ndarray:
    """The gradient with respect to r of those of q, k and v."""
    of_k = dk[..., :3] - dk[..., 3:] * r[:, :, None]
    return (dq[..., :3] + a[:, None] * of_k + dv).sum(2)


def energy(parameters: Parameters, r: np.ndarray, calls: Any) -> np.ndarray:
    """The energy of each configuration."""
    a = np.exp(parameters["log_a"])
    x = Inputs.of(r, a)
    out, lse = calls.forward(x.q, x.k, x.v, scale=1.0, return_lse=True)
    y = _Features(r, a, out, lse).x @ parameters["w1"] + parameters["b1"]
    return (np.tanh(y) @ parameters["w2"]).sum(-1)


class _Features:
    """u and t of all heads, and what they are made of."""

    def __init__(
        self, r: np.ndarray, a: np.ndarray, out: np.ndarray, lse: np.ndarray
    ) -> None:
        self.r, self.a = r, a
        self.square = (r**2).sum(-1)[..., None]
        self.gap = out - r[:, :, None]
        self.gap_square = (self.gap**2).sum(-1)
        u = np.moveaxis(lse, 1, 2) - a * self.square / 2
        self.x = np.concatenate([u, a * self.gap_square], -1)

    def cotangents(self, dx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of out and lse for one of x."""
        du, dt = np.split(dx, 2, axis=-1)
        dout = 2 * (self.a * dt)[..., None] * self.gap
        return dout, np.ascontiguousarray(np.moveaxis(du, 2, 1))


def step(
    parameters: Parameters, r: np.ndarray, target: np.ndarray, calls: Any
) -> tuple[float, Parameters, np.ndarray]:
    """The loss on forces, its gradients, and the forces.

    With s the gradient of the loss with respect to dE/dr, the gradients of the
    loss are those of <s, dE/dr>: E's derivative along s, <dE/dx, x'>, where x'
    is the velocity of the features if r has the velocity s.

    Parameters
    ----------
    parameters : dict
    r, target : array, (batch, atoms, 3)
        Positions, and the forces wanted there.
    calls : module
        Has forward, backward and double_backward: cuflash, or `dense`.
    """
    a, w1, w2 = np.exp(parameters["log_a"]), parameters["w1"], parameters["w2"]
    x = Inputs.of(r, a)
    qkv = x.q, x.k, x.v
    out, lse = calls.forward(*qkv, scale=1.0, return_lse=True)
    features = _Features(r, a, out, lse)
    tanh = np.tanh(features.x @ w1 + parameters["b1"])
    slope = (1 - tanh**2) * w2
    dx = slope @ w1.T
    dout, dlse = features.cotangents(dx)
    own = {"out": out, "lse": lse, "scale": 1.0}
    dq, dk, dv = calls.backward(dout, *qkv, dlse=dlse, **own)
    forces = -positions_of(dq, dk, dv, r, a) + _direct(features, dx, dout)

    error = forces - target
    s = -2 * error / error.size
    moved = Inputs.tangents(r, s, a)
    _, d2k, _, out_dot, lse_dot = calls.double_backward(
        moved.q, moved.k, moved.v, dout, *qkv, dlse=dlse, return_ddlse=True,
        **own,
    )  # fmt: skip
    gap_dot = out_dot - s[:, :, None]
    along = (r * s).sum(-1)[..., None]
    du_dot = np.moveaxis(lse_dot, 1, 2) - a * along
    dt_dot = 2 * a * (features.gap * gap_dot).sum(-1)
    x_dot = np.concatenate([du_dot, dt_dot], -1)
    y_dot = x_dot @ w1
    dy = -2 * tanh * slope * y_dot
    d2x = dy @ w1.T

    # Of the widths: by k, k', and each a in a feature and its velocity.
    d2out, d2lse = features.cotangents(d2x)
    dt = np.split(dx, 2, axis=-1)[1]
    d2out += 2 * (a * dt)[..., None] * gap_dot
    _, more, _ = calls.backward(d2out, *qkv, dlse=d2lse, **own)
    of_log_a = ((d2k + more) * x.k + dk * moved.k).sum(-1)
    for gradient, square, gap in (
        (d2x, features.square / 2, features.gap_square),
        (dx, along, dt_dot / a),
    ):
        du, dt = np.split(gradient, 2, axis=-1)
        of_log_a += a * (dt * gap - du * square)
    gradients = {
        "log_a": of_log_a.sum((0, 1)),
        "w1": np.einsum("bnx,bny->xy", features.x, dy)
        + np.einsum("bnx,bny->xy", x_dot, slope),
        "b1": dy.sum((0, 1)),
        "w2": ((1 - tanh**2) * y_dot).sum((0, 1)),
    }
    return float((error**2).mean()), gradients, forces


def _direct(
    features: _Features, dx: np.ndarray, dout: np.ndarray
) -> np.ndarray:
    """The force by way of r in the features themselves."""
    du = np.split(dx, 2, axis=-1)[0]
    return (features.a * du).sum(-1)[..., None] * features.r + dout.sum(2)
