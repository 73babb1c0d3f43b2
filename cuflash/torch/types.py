"""Types of keywords, for the overloads that tell a call's results.

Those of `attention` stand in cuflash/api/types.py. A test holds all of them
to the signatures.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from cuflash import distributed

Results = tuple[torch.Tensor, torch.Tensor]  # out and lse


class CacheOptions(TypedDict, total=False):
    """The keywords of `forward_kvcache` but return_lse."""

    k_new: torch.Tensor | None
    v_new: torch.Tensor | None
    cache_seqlens: int | torch.Tensor | None
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    rotary_interleaved: bool
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    sink: torch.Tensor | None
    num_splits: int | None
    out: torch.Tensor | None


class _Shared(TypedDict):
    group: distributed.Group


class SharedOptions(_Shared, total=False):
    """The keywords of `distributed_attention` but return_lse."""

    causal: bool
    layout: str
    ulysses: int
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    precision: str | None
    deterministic: bool
    cu_seqlens_q: Any
    cu_seqlens_k: Any
