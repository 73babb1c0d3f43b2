"""The launcher: runs a `Recipe` on a call's arrays.

Nothing is decided here. All kernels are launched by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cuflash.backends.base import Backend
from cuflash.launch.copies import new_array, readable
from cuflash.launch.recipe import Recipe, remembered
from cuflash.request.layouts import Boxes
from cuflash.request.problem import Call
from cuflash.request.traced import bits


def run(
    recipe: Recipe,
    call: Call,
    backend: Backend,
    results: Mapping[str, Any],
    shared: tuple[Any, ...] = (),
) -> None:
    """Launch a recipe's kernels, which write `results`, by name.

    The address of a result that is None is null. `shared` are the buffers of
    `Recipe.keeps`.
    """
    read = recipe.inputs(call.given)
    if recipe.options:
        read += recipe.options(call.options)
    if recipe.tangents:
        read += recipe.tangents(call.tangents)
    wanted = written = recipe.results(results)
    if recipe.copies:
        read, written = _accessible(recipe, call, backend, read, written)
    numbers = 0, call.seed, call.cache_seqlens, *bits(call.mod_numbers)
    _launch(recipe, backend, numbers, read, written, shared)
    if written is not wanted:
        for result, copy in zip(wanted, written, strict=True):
            if copy is not result:
                backend.copy(result, copy)


# What `run` calls numbers, of calls without any.
_NO_NUMBERS = 0, 0, 0, *bits(())


class Launched:
    """Calls that give addresses alone, and whose results are new.

    Options' arrays, and numbers that differ from call to call, are more.
    Nothing is left to look up, which takes as long as the rest of a call.

    Parameters
    ----------
    recipe : Recipe
        Whose calls are such, and copy no array.
    rows : mapping of str to (shape, dtype)
        Its results by name, but for lse.
    lse : (shape, dtype), optional
        None if it is no result or not wanted.
    """

    def __init__(
        self,
        recipe: Recipe,
        rows: Mapping[str, tuple[tuple[int, ...], Any]],
        lse: tuple[tuple[int, ...], Any] | None = None,
    ) -> None:
        self.recipe, self.lse = recipe, lse
        self.rows = [rows[name] for name in recipe.writes if name in rows]
        self.writes_lse = "lse" in recipe.writes

    def run(self, inputs: tuple[Any, ...], backend: Backend) -> list[Any]:
        """The results in full rank, by the recipe's `writes`.

        `inputs` are in the order of its `reads`. An lse that is not wanted
        is None.
        """
        with backend.current():
            results = [backend.rows(*x) for x in self.rows]
            if self.writes_lse:
                lse = backend.empty(*self.lse) if self.lse else None
                results.append(lse)
            _launch(self.recipe, backend, _NO_NUMBERS, inputs, results)
        return results


def _launch(
    recipe: Recipe,
    backend: Backend,
    numbers: tuple[int, ...],
    read: tuple[Any, ...],
    written: Iterable[Any],
    shared: tuple[Any, ...] = (),
) -> None:
    """Launch a recipe's kernels on arrays that they can access.

    `numbers` come before addresses in what `Recipe.ordered` takes.
    """
    # Kept alive until the kernels are queued: after that, the stream's order
    # makes it safe to reuse the memory. So are the caller's copies.
    kept: Any = None
    buffers: Sequence[int] = ()
    if recipe.workspace:
        kept, buffers = backend.workspace(recipe.workspace)
    if shared:
        buffers = [*buffers, *backend.address(shared, written=True)]
    addresses = recipe.ordered((
        *numbers,
        *backend.address(read),
        *backend.address(written, written=True),
        *buffers,
    ))  # fmt: skip
    fill = _arguments if recipe.repeats else _filled
    arguments = fill(recipe, backend.tensor_map, addresses)
    backend.launch(recipe.loaded, arguments, recipe.template.kind)


def _accessible(
    recipe: Recipe,
    call: Call,
    backend: Backend,
    read: tuple[Any, ...],
    written: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays, or copies of those that kernels cannot access in place."""
    copies = recipe.copies
    return tuple([
        readable(name, copies[name], call, backend) if name in copies else x
        for name, x in zip(recipe.reads, read, strict=True)
    ]), tuple([
        new_array(copies[name], backend) if name in copies else x
        for name, x in zip(recipe.writes, written, strict=True)
    ])  # fmt: skip


def _filled(
    recipe: Recipe,
    tensor_map: Callable[[int, Boxes], bytes],
    addresses: tuple[int, ...],
) -> bytes:
    maps = [tensor_map(addresses[i], boxes) for i, boxes in recipe.boxes]
    return recipe.template.fill(maps, addresses)


# Addresses repeat: results come from a memory pool, weights do not move.
_arguments = remembered(_filled)
