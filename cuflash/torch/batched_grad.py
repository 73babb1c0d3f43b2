"""The vmap inside torch.autograd: is_grads_batched, and vectorize=True.

It is older than torch.func's and knows no rules of autograd Functions: what
it has mapped is handed on to torch.func.vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .vmap import over_first_axes

is_batched = torch._C._functorch.is_legacy_batchedtensor


def call(
    function: Callable[..., tuple[Any, ...]], *tensors: Any
) -> tuple[Any, ...]:
    """`function(*tensors)`, of which some may be mapped.

    Parameters
    ----------
    function : callable
        Returns tensors and None, and works under torch.func.vmap.
    *tensors : Tensor or None
    """
    mapped = [x is not None and is_batched(x) for x in tensors]
    if not any(mapped):
        return function(*tensors)
    level = _level()
    # The size is ignored: it is that of tensors that are not mapped.
    given = [
        torch._remove_batch_dim(x, level, 1, 0) if is_mapped else x
        for x, is_mapped in zip(tensors, mapped, strict=True)
    ]
    return tuple(
        None if x is None else torch._add_batch_dim(x, 0, level)
        for x in over_first_axes(function, given, mapped)
    )


def _level() -> int:
    """The level of the innermost such vmap."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level
