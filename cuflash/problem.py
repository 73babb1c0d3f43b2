"""What was asked: `Problem`, the values, and `Call`, with the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Problem:
    """One attention problem, without its arrays.

    Equal problems get equal plans. A ``"merge"`` problem (`merge_states`)
    has no keys: ``seqlen_k`` is 0, ``scale`` 1, ``num_heads_kv`` equals
    ``num_heads_q`` and ``head_dim`` equals ``head_dim_v``.
    """

    direction: Literal["forward", "backward", "merge"]
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    causal: bool = False
    block_q: int | None = None
    block_k: int | None = None
    deterministic: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share a key head: head h reads h // group_size."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def lse_dtype(self) -> Literal["float32", "float64"]:
        """The dtype of lse."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True, eq=False)
class Call:
    """A problem and its checked arrays, all on one device.

    Attributes
    ----------
    problem : Problem
    arrays : mapping of str to array
        The inputs by argument name, as views in full rank: q, k, v, out and
        dout are (batch, seqlen, heads, head_dim), lse is (batch,
        num_heads_q, seqlen_q). Any strides.
    rank : int
        2, 3 or 4: the rank of the arrays that the user passed.
    return_lse : bool
        Forward: whether lse is wanted.
    out : array or None
        Forward: the user's ``out=``, in full rank, to be written to.
    """

    problem: Problem
    arrays: Mapping[str, Any]
    rank: int
    return_lse: bool = False
    out: Any = None
