"""Rotary position embedding as a module of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.flash_attn.layers.functions import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by tables that grow as sequences do.

    Parameters
    ----------
    dim : int
        rotary_dim: the columns that are rotated.
    base : float, optional
        Pair i of a token at position m turns by ``m * base ** (-2 i / dim)``.
    interleaved : bool, optional
        As in `apply_rotary_emb`.
    scale_base : float, optional
        xPos [1]_: queries are multiplied, and keys divided, by
        ``((2 i + 0.4 dim) / (1.4 dim)) ** ((m - seqlen // 2) / scale_base)``.
    device : optional
        Of the frequencies.

    References
    ----------
    .. [1] Y. Sun et al., "A Length-Extrapolatable Transformer",
       arXiv:2212.10554.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        inv_freq = self._frequencies(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._tables: tuple[Any, ...] = ()
        self._made_for: tuple[Any, ...] = (0, None, None)

    def forward(
        self,
        qkv: Any,
        kv: Any = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate in place.

        Parameters
        ----------
        qkv : Tensor
            As in `apply_rotary_emb_qkv_`; with `kv`, the queries alone,
            (batch, seqlen, nheads, headdim).
        kv : Tensor, (batch, seqlen, 2, nheads_k, headdim), optional
        seqlen_offset : int or Tensor, (batch,), optional
            The position of each sequence's first token. Give `max_seqlen`
            with a tensor: no position may be beyond.
        max_seqlen, num_heads_q : int, optional

        Returns
        -------
        qkv, or (q, kv) with `kv`
        """
        length = max_seqlen
        if length is None:
            length = qkv.shape[1]
            if not isinstance(seqlen_offset, torch.Tensor):
                length += seqlen_offset
        cos, sin, cos_k, sin_k = self._tables_of(length, qkv)
        options = {
            "interleaved": self.interleaved,
            "seqlen_offsets": seqlen_offset,
        }
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **options
            )
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, **options)

    def _tables_of(self, length: int, x: Any) -> tuple[Any, ...]:
        """Cosines and sines of queries, then of keys; made anew to grow."""
        known, device, dtype = self._made_for
        if length > known or (x.device, x.dtype) != (device, dtype):
            with torch.no_grad(), torch.inference_mode(False):
                self._tables = self._make(length, x)
            self._made_for = (length, x.device, x.dtype)
        return self._tables

    def _make(self, length: int, x: Any) -> tuple[Any, ...]:
        position = torch.arange(length, device=x.device, dtype=torch.float32)
        # A model in 16 bits has rounded its buffers.
        exact = self.inv_freq.dtype == torch.float32
        angles = torch.outer(
            position,
            self.inv_freq if exact else self._frequencies(x.device),
        )
        cos, sin = torch.cos(angles), torch.sin(angles)
        tables = (cos, sin, cos, sin)
        if self.scale_base is not None:
            even = torch.arange(0, self.dim, 2, device=x.device)
            size = (even + 0.4 * self.dim) / (1.4 * self.dim)
            power = (position - length // 2) / self.scale_base
            grown = size ** power[:, None]
            tables = (cos * grown, sin * grown, cos / grown, sin / grown)
        return tuple(table.to(x.dtype) for table in tables)

    def _frequencies(self, device: Any) -> torch.Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (even / self.dim)
