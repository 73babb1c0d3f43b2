"""The weights that a Hugging Face model returns: output_attentions=True."""

from __future__ import annotations

import math
from typing import Any

import torch

from cuflash.errors import UnsupportedError

from .readouts import weights

# Bytes of one layer's weights: below it a model's layers together fit beside
# what a GPU holds otherwise, above it one layer's matrix alone is what
# cuflash is there to avoid.
MOST_BYTES = 2**30


def check_size(q: torch.Tensor, num_keys: int) -> None:
    """Refuse a matrix of more than MOST_BYTES.

    `q` is (batch, seqlen_q, heads, head_dim), the weights have its dtype.
    """
    batch, num_queries, heads, _ = q.shape
    shape = batch, heads, num_queries, num_keys
    nbytes = math.prod(shape) * q.element_size()
    if nbytes > MOST_BYTES:
        raise UnsupportedError(
            f"output_attentions=True asks for weights {shape}, {nbytes} bytes "
            f"in each layer, expected at most {MOST_BYTES}: leave it out, and "
            "call cuflash.torch.weights for chosen queries, weight_sums for a "
            "number a key, or entropy for a number a query, on a layer's q, k "
            "and lse; or load the model with attn_implementation='eager'"
        )


def of_call(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    options: dict[str, Any],
    width: int,
) -> torch.Tensor:
    """The weights of all queries, in the dtype of `q`.

    Parameters
    ----------
    q, k, lse : Tensor
        Of a call of `attention`.
    options : dict
        Its options. A bias that requires grad has its gradient.
    width : int
        The number of columns; keys that the call left out have 0.
    """
    bias = options.get("bias")
    if bias is not None:
        options = {**options, "bias": bias.detach()}
    found = weights(q, k, lse, dtype=q.dtype, **options)
    if bias is not None and bias.requires_grad:
        # The derivative of a weight by its own bias is the weight.
        change = torch.where(bias.isfinite(), bias - bias.detach(), 0)
        found = found * change.exp().to(found.dtype)
    missing = width - found.shape[-1]
    return torch.nn.functional.pad(found, (0, missing)) if missing else found
