"""Types of keywords, for the overloads that tell a call's results.

A test holds them to the signatures.
"""

from __future__ import annotations

from typing import Any, TypedDict

import jax
from jax.typing import ArrayLike

Results = tuple[jax.Array, jax.Array]  # out and lse


class Options(TypedDict, total=False):
    """The keywords of `attention` but return_lse."""

    scale: float | None
    causal: bool
    block_q: int | None
    block_k: int | None
    precision: str | None
    num_splits: int | None
    deterministic: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: ArrayLike | None
    bias: ArrayLike | None
    mask: ArrayLike | None
    sink: ArrayLike | None
    segment_ids_q: ArrayLike | None
    segment_ids_k: ArrayLike | None
    dropout: float
    seed: Any
    cu_seqlens_q: ArrayLike | None
    cu_seqlens_k: ArrayLike | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
