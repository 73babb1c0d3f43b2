"""What `weights`, `weight_sums` and `entropy` ask: a `Readout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cuflash.request.problem import Problem

# Directions that read numbers inside the softmax, and their gradients.
READOUTS = "weights", "weight_sums", "entropy"
READOUT_GRADIENTS = tuple(f"{x}_backward" for x in READOUTS)

# What their gradients take first.
COTANGENTS = {
    "weights": "dweights", "weight_sums": "dsums", "entropy": "dentropy",
}  # fmt: skip


def cotangent_of(direction: str) -> str:
    """What a direction of READOUT_GRADIENTS takes first."""
    return COTANGENTS[direction.removesuffix("_backward")]


# The arrays of READOUTS beside q, k, lse and the options: int32 indices, a
# bool, and a number of lse's dtype.
READOUT_ARRAYS = "queries", "keys", "heads", "chosen", "row_weights"


@dataclass(frozen=True)
class Readout:
    """What `weights`, `weight_sums` and `entropy` ask, without its arrays.

    Of their gradients too. An axis that is not chosen from is None.

    Attributes
    ----------
    queries, keys, heads : int or None
        `weights`: how many indices of each are chosen.
    by_batch : bool
        `weights`: whether each batch element has queries of its own.
        `weight_sums`: whether `chosen` does.
    dtype : str
        Of the weights; that of lse in the other calls.
    chosen : bool
        `weight_sums`: whether a flag tells which queries count.
    row_weights : bool
        `weight_sums`: whether rows have weights of their own.
    reduce : str
        `weight_sums`: how a key's weights become one number.
    return_drow_weights : bool
        `weight_sums_backward`.
    """

    dtype: str
    queries: int | None = None
    keys: int | None = None
    heads: int | None = None
    by_batch: bool = False
    chosen: bool = False
    row_weights: bool = False
    reduce: Literal["sum", "max"] = "sum"
    return_drow_weights: bool = False


def weights_shape(p: Problem) -> tuple[int, int, int, int]:
    """The shape of weights in full rank: (batch, heads, queries, keys)."""
    readout = p.readout
    assert readout is not None
    sizes = (
        (readout.heads, p.num_heads_q), (readout.queries, p.seqlen_q),
        (readout.keys, p.seqlen_k),
    )  # fmt: skip
    heads, queries, keys = (own if some is None else some
                            for some, own in sizes)  # fmt: skip
    return p.batch, heads, queries, keys
