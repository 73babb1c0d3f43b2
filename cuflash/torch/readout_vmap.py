"""torch.func.vmap of `weights`, `weight_sums`, `entropy` and gradients.

As in `vmap`, the mapped axis joins batch, or calls run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuflash.expressions.serial import loads
from cuflash.request.vmap import Fold, Names, is_folded

from .functions import named_at
from .readout_function_ops import Program
from .readout_ops import POSITIONAL, inputs_of
from .recording import reads_batch

_INPUTS = "q", "k", "lse"

Given = Sequence[tuple[str, Any, bool]]  # name, tensor, whether it is mapped


def mapped(
    name: str,
    call: Callable[..., Any],
    info: Any,
    dims: Sequence[int | None],
    tensors: Sequence[Any],
    program: Program | None = None,
    of_read: Sequence[int] = (),
) -> tuple[Any, Any]:
    """The results for tensors of which some are mapped, and their axes.

    Parameters
    ----------
    name : str
        Of a readout, or of its gradients.
    call : callable
        Makes it, of tensors in the order of the operator's schema.
    info, dims
        As torch.func tells them.
    tensors : sequence of Tensor or None
    program : tuple or None
        Of functions, as `readout_function_ops.call` takes it.
    of_read : sequence of int
        The places of what these read whose gradients are wanted.
    """
    names = *inputs_of(name), *POSITIONAL
    count = len(tensors) - len(names)
    names = *names, *map(named_at, range(count))
    of_batch = program is not None and reads_batch(loads(program[1]))
    given = [
        (own, x if dim is None else x.movedim(dim, 0), dim is not None)
        for own, x, dim in zip(names, tensors, dims, strict=True)
    ]
    wrt = *_INPUTS, *map(named_at, of_read)
    run = _together if _joins(given, of_batch, wrt) else _one_by_one
    found = run(call, info.batch_size, given)
    return found, 0 if isinstance(found, torch.Tensor) else (0,) * len(found)


def _joins(given: Given, of_batch: bool, wrt: Names) -> bool:
    """Whether the mapped axis can join batch."""
    there = [x for x in given if x[1] is not None]
    names = tuple(name for name, *_ in there)
    moves = [is_mapped for *_, is_mapped in there]
    ranks = {name: x.ndim - is_mapped for name, x, is_mapped in there}
    return ranks["q"] == 4 and is_folded(names, moves, of_batch, wrt)


def _together(call: Callable[..., Any], size: int, given: Given) -> Any:
    q, is_mapped = next((x, y) for name, x, y in given if name == "q")
    batch = q.shape[is_mapped]
    fold = Fold(size, batch, _INPUTS, torch.broadcast_to)
    found = call(
        *(None if x is None else fold.joined(n, x, y) for n, x, y in given)
    )
    if isinstance(found, torch.Tensor):
        return fold.split(found, batch)
    return tuple(fold.split(x, batch) for x in found)


def _one_by_one(call: Callable[..., Any], size: int, given: Given) -> Any:
    results = [
        call(*(x[index] if is_mapped else x for _, x, is_mapped in given))
        for index in range(size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(map(torch.stack, zip(*results, strict=True)))
