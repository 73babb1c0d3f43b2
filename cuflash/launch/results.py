"""The shapes of results, in full rank."""

from __future__ import annotations

from cuflash.request.problem import Problem


def out_shape_of(p: Problem) -> tuple[int, ...]:
    """The shape of out."""
    return p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v


def lse_shape_of(p: Problem) -> tuple[int, ...]:
    """The shape of lse."""
    return p.batch, p.num_heads_q, p.seqlen_q


def gradient_shapes_of(p: Problem) -> dict[str, tuple[int, ...]]:
    """The shapes of dq, dk and dv, by name."""
    return {
        "dq": (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim),
        "dk": (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim),
        "dv": (p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim_v),
    }
