"""torch.func.vmap of attention and its derivatives.

The mapped axis joins batch, or calls run one after another (`request.vmap`).
If only tangents are mapped, as by jacfwd, it is the axis of directions of one
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cuflash.request.vmap import Fold, Names, is_folded

Dims = Sequence[int | None]
Given = Sequence[tuple[str, Any, bool]]  # name, tensor, whether it is mapped
Results = tuple[tuple[Any, ...], Any]  # and the axis of each that is mapped


@dataclass(frozen=True)
class Rule:
    """How a torch.autograd.Function of a static argument and tensors maps.

    Attributes
    ----------
    function : type
    static : derivatives.Static
        With `several`, tangents have an axis of directions.
    inputs, outputs : tuple of str
        The names of the tensors and of the results. A tangent or gradient has
        the name of what it belongs to.
    num_moved : int
        How many of the first inputs are tangents or cotangents.
    """

    function: Any
    static: Any
    inputs: Names
    outputs: Names
    num_moved: int = 0

    def map(self, info: Any, dims: Dims, tensors: Sequence[Any]) -> Results:
        """The results for tensors of which some are mapped."""
        given = [
            (name, x if dim is None else x.movedim(dim, 0), dim is not None)
            for name, x, dim in zip(self.inputs, tensors, dims, strict=True)
        ]
        mapped = [is_mapped for *_, is_mapped in given]
        moved = {n for n, x, _ in given[: self.num_moved] if x is not None}
        wrt = tuple((moved | {*self.outputs}) - {"out", "lse"})
        static = self.static
        folded = is_folded(self.inputs, mapped, static.of_batch, wrt)
        if not (folded and self._is_full(given, wrt)):
            return self._one_by_one(info.batch_size, given), 0
        sizes = {
            name: x.shape[is_mapped]
            for name, x, is_mapped in given
            if x is not None
        }
        fold = Fold(info.batch_size, sizes["q"], wrt, torch.broadcast_to)
        results = self.function.apply(static, *self._joined(fold, given))
        batches = (sizes[x] if x in wrt else sizes["q"] for x in self.outputs)
        if not static.several:
            return tuple(map(fold.split, results, batches)), 0
        split = [
            torch.func.vmap(fold.split, (0, None))(x, batch)
            for x, batch in zip(results, batches, strict=True)
        ]
        return tuple(split), 1

    def _is_full(self, given: Given, wrt: Names) -> bool:
        """Whether q, and a bias that has gradients, have all axes."""
        return all(
            x is None or x.ndim - is_mapped == 4
            for name, x, is_mapped in given[self.num_moved :]
            if name == "q" or (name == "bias" and name in wrt)
        )

    def _joined(self, fold: Fold, given: Given) -> list[Any]:
        joined = []
        for index, (name, x, is_mapped) in enumerate(given):
            join: Any = fold.joined
            if self.static.several and index < self.num_moved:
                axes = (None, int(is_mapped), None)
                join = torch.func.vmap(fold.joined, axes)
            joined.append(None if x is None else join(name, x, is_mapped))
        return joined

    def _one_by_one(self, size: int, given: Given) -> tuple[Any, ...]:
        results = [
            self.function.apply(
                self.static,
                *(x[index] if is_mapped else x for _, x, is_mapped in given),
            )
            for index in range(size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True)))

    def map_tangents(
        self, info: Any, dims: Dims, tensors: Sequence[Any]
    ) -> Results:
        """As `map`, where mapped tangents become directions."""
        n = self.num_moved
        if any(dim is not None for dim in dims[n:]):
            return self.map(info, dims, tensors)
        several = self.static.several
        moved = [
            None if x is None else _directions(x, dim, info, several)
            for x, dim in zip(tensors[:n], dims[:n], strict=True)
        ]
        static = replace(self.static, several=True)
        results = self.function.apply(static, *moved, *tensors[n:])
        if several:
            sizes = info.batch_size, len(results[0]) // info.batch_size
            results = tuple(x.unflatten(0, sizes) for x in results)
        return results, 0


def _directions(x: Any, dim: int | None, info: Any, several: bool) -> Any:
    """A tangent whose first axis is the mapped one, and directions so far."""
    if dim is None:
        x = x.expand(info.batch_size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.flatten(0, 1) if several else x


def over_first_axes(
    function: Callable[..., tuple[Any, ...]],
    tensors: Sequence[Any],
    mapped: Sequence[bool],
) -> tuple[Any, ...]:
    """vmap of a function of tensors, where arguments and results may be None.

    The mapped axis is the first of each tensor that is mapped.
    """
    there: list[bool] = []

    def of_tensors(*given: Any) -> tuple[Any, ...]:
        results = function(*given)
        there[:] = [x is not None for x in results]
        return tuple(x for x in results if x is not None)

    dims = tuple(0 if is_mapped else None for is_mapped in mapped)
    rest = iter(torch.func.vmap(of_tensors, dims)(*tensors))
    return tuple(next(rest) if is_there else None for is_there in there)
