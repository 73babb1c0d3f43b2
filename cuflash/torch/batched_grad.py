"""The vmap inside torch.autograd: is_grads_batched, and vectorize=True.

It is older than torch.func's and knows no rules of autograd Functions: what
it has mapped is handed on to torch.func.vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
    dims = tuple(0 if is_mapped else None for is_mapped in mapped)
    there: list[bool] = []

    def of_tensors(*given: Any) -> tuple[Any, ...]:
        results = function(*given)
        there[:] = [x is not None for x in results]
        return tuple(x for x in results if x is not None)

    rest = iter(torch.func.vmap(of_tensors, dims)(*given))
    return tuple(
        torch._add_batch_dim(next(rest), 0, level) if is_there else None
        for is_there in there
    )


def _level() -> int:
    """The level of the innermost such vmap."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level
