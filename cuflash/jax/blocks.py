"""Attention by XLA, in blocks of queries: JAX differentiates it.

For derivatives that no kernel computes: forward mode over forward mode, and
all beyond the second. A block holds the scores of some queries and all keys:
memory is linear in seqlen. In reverse mode each block is computed again. It
knows every option. Arithmetic is that of lse's dtype. Unlike in kernels, NaN
and infinities of keys that are masked reach the results.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cuflash.request.traced import is_named

from . import philox
from .evaluate import evaluate

# Scores of a block, unless one query has more.
_MOST = 2**23


def attend(given: Mapping[str, Any], asked: Mapping[str, Any]) -> list[Any]:
    """Out and lse.

    Parameters
    ----------
    given : mapping
        The arrays by name: q, k, v in full rank or packed, and options.
    asked : mapping
        The other arguments, those that are not defaults.
    """
    q, k, v = (given[x] for x in "qkv")
    is_packed = q.ndim == 3
    if is_packed:
        q, k, v = q[None], k[None], v[None]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q = q.reshape(batch, seqlen_q, kv_heads, -1, head_dim)
    call = _Call(
        {**given, "q": q, "k": k.astype(wide), "v": v.astype(wide)},
        {"scale": head_dim**-0.5, **asked},
        _places(given, batch, seqlen_q, seqlen_k),
    )
    rows = max(1, min(seqlen_q, _MOST // max(batch * heads * seqlen_k, 1)))
    if rows == seqlen_q:
        out, lse = call.rows(jnp.arange(seqlen_q))
    else:
        count = -(-seqlen_q // rows)
        # Rows beyond the end are those of the last one, and are cut off.
        blocks = jnp.arange(count * rows).reshape(count, rows)
        out, lse = jax.lax.map(jax.checkpoint(call.rows), blocks)
        out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *out.shape[3:])
        lse = jnp.moveaxis(lse, 0, 2).reshape(batch, heads, -1)
    out, lse = out[:, :seqlen_q].astype(q.dtype), lse[..., :seqlen_q]
    return [out[0], lse[0]] if is_packed else [out, lse]


class _Places(NamedTuple):
    """Where tokens are.

    Attributes
    ----------
    sequence_q, sequence_k : array or None
        The sequence of each token, if they are packed; of those behind the
        last one, their count.
    index_q, index_k : array
        The number of each token in its sequence.
    lengths_q, lengths_k : array or int
        The lengths of the sequences; of all, if they are not packed.
    """

    sequence_q: Any
    sequence_k: Any
    index_q: Any
    index_k: Any
    lengths_q: Any
    lengths_k: Any


def _places(
    given: Mapping[str, Any], batch: int, seqlen_q: int, seqlen_k: int
) -> _Places:
    if "cu_seqlens_q" not in given:
        index_q, index_k = jnp.arange(seqlen_q), jnp.arange(seqlen_k)
        return _Places(None, None, index_q, index_k, seqlen_q, seqlen_k)
    found = []
    for name, total in (
        ("cu_seqlens_q", seqlen_q),
        ("cu_seqlens_k", seqlen_k),
    ):
        ends, token = given[name], jnp.arange(total)
        sequence = jnp.searchsorted(ends[1:], token, side="right")
        found.append((sequence, token - ends[sequence], jnp.diff(ends)))
    return _Places(*(x for pair in zip(*found, strict=True) for x in pair))


class _Call(NamedTuple):
    given: Mapping[str, Any]
    asked: Mapping[str, Any]
    places: _Places

    def rows(self, token: Any) -> tuple[Any, Any]:
        """Out (batch, rows, heads, head_dim_v) and lse of some queries."""
        k, v = self.given["k"], self.given["v"]
        token = jnp.minimum(token, self.places.index_q.shape[0] - 1)
        q = self.given["q"][:, token].astype(k.dtype)
        product = functools.partial(jnp.einsum, precision="highest")
        s = product("bngxd,bmgd->bgxnm", q, k) * self.asked["scale"]
        s = s.reshape(s.shape[0], -1, *s.shape[3:])
        pairs = _Pairs.of(self, token, s.shape)
        s = self._modified(s, token, pairs)
        s, seen = jnp.broadcast_arrays(s, self._visible(token, pairs))
        shift = jnp.max(jnp.where(seen, s, -jnp.inf), -1, initial=-jnp.inf)
        sink = self.given.get("sink")
        if sink is not None:
            sink = jnp.where(
                self._belongs(token), sink.astype(s.dtype)[:, None], -jnp.inf
            )
            shift = jnp.maximum(shift, sink)
        # Nothing depends on it; of a row that sees nothing it is 0.
        shift = jax.lax.stop_gradient(shift)
        shift = jnp.where(jnp.isfinite(shift), shift, 0)[..., None]
        p = jnp.where(seen, jnp.exp(jnp.where(seen, s, shift) - shift), 0)
        total = p.sum(-1)
        if sink is not None:
            total = total + jnp.exp(sink - shift[..., 0])
        divisor = jnp.where(total == 0, 1, total)
        lse = jnp.where(total == 0, -jnp.inf, shift[..., 0] + jnp.log(divisor))
        p = self._dropped(p / divisor[..., None], pairs)
        p = p.reshape(k.shape[0], k.shape[2], -1, *p.shape[2:])
        out = product("bgxnm,bmgd->bngxd", p, v)
        return out.reshape(*out.shape[:2], -1, v.shape[-1]), lse

    def _modified(self, s: Any, token: Any, pairs: _Pairs) -> Any:
        cap = self.asked.get("softcap")
        if cap is not None:
            s = cap * jnp.tanh(s / cap)
        slopes = self.given.get("alibi_slopes")
        if slopes is not None:
            if self.places.sequence_q is not None and slopes.ndim == 2:
                slopes = slopes[pairs.b[0, 0, :, 0]].T[None, :, :, None]
            else:
                slopes = slopes[..., None, None]
            s = s - slopes.astype(s.dtype) * abs(pairs.offset)
        bias = self.given.get("bias")
        if bias is not None:
            s = s + _of_rows(bias, token).astype(s.dtype)
        return self._by_function("score_mod", s, pairs)

    def _by_function(self, role: str, x: Any, pairs: _Pairs) -> Any:
        """What a user's function makes of scores, or its mask."""
        root = self.asked.get(role)
        if root is None:
            return x
        return evaluate(
            root,
            {**pairs._asdict(), "score": x},
            [y for n, y in self.given.items() if is_named(n)],
            [*self.asked.get("mod_arrays", {}).values()],
            self.given["k"].dtype,
        )

    def _belongs(self, token: Any) -> Any:
        """Whether queries are of a sequence; padding of packed ones is not."""
        sequence = self.places.sequence_q
        if sequence is None:
            return jnp.ones(token.shape, bool)
        return sequence[token] < len(self.given["cu_seqlens_q"]) - 1

    def _visible(self, token: Any, pairs: _Pairs) -> Any:
        left, right = self.asked.get("window", (None, None))
        if self.asked.get("causal"):
            right = 0 if right is None else min(right, 0)
        seen = jnp.ones((), bool)
        if left is not None:
            seen &= pairs.offset >= -left
        if right is not None:
            seen &= pairs.offset <= right
        if self.places.sequence_q is not None:
            seen &= pairs.b == self.places.sequence_k
            seen &= self._belongs(token)[:, None]
        seen &= self._by_function("mask_mod", True, pairs)
        mask = self.given.get("mask")
        if mask is not None:
            seen &= _of_rows(mask, token)
        ids = self.given.get("segment_ids_q")
        if ids is not None:
            of_keys = self.given["segment_ids_k"]
            same = ids[..., token, None] == of_keys[..., None, :]
            seen &= same[..., None, :, :] if same.ndim == 3 else same
        return seen

    def _dropped(self, p: Any, pairs: _Pairs) -> Any:
        probability = self.asked.get("dropout")
        if not probability:
            return p
        seed = self.given.get("seed", self.asked.get("seed"))
        kept = philox.kept(
            probability, seed, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx
        )
        return jnp.where(kept, p / (1 - probability), 0)


class _Pairs(NamedTuple):
    """What is known of pairs: each broadcasts to (batch, heads, rows, keys).

    `offset` is the place of the key, counted from that of the query where
    both sequences are aligned at the end.
    """

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
    offset: Any
    seqlen_q: Any
    seqlen_k: Any

    @classmethod
    def of(cls, call: _Call, token: Any, shape: tuple[int, ...]) -> _Pairs:
        """Those of some queries."""
        places, heads = call.places, jnp.arange(shape[1])[:, None, None]
        q_idx = places.index_q[token][:, None]
        b = jnp.arange(shape[0])[:, None, None, None]
        lengths = places.lengths_q, places.lengths_k
        if places.sequence_q is not None:
            b = places.sequence_q[token][None, None, :, None]
            lengths = lengths[0][b], lengths[1][b]
        shift = lengths[1] - lengths[0]
        offset = places.index_k - q_idx - shift
        return cls(b, heads, q_idx, places.index_k, offset, *lengths)


def _of_rows(x: Any, token: Any) -> Any:
    """Rows of an array of pairs, which may have one for all queries."""
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., token, :]
