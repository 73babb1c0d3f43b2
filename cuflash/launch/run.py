"""The launcher: runs a `Recipe` on a call's arrays.

Nothing is decided here. All kernels are launched by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuflash.backends.base import Backend
from cuflash.launch.copies import new_array, readable
from cuflash.launch.recipe import Recipe, remembered
from cuflash.launch.results import lse_shape_of, out_shape_of
from cuflash.launch.structs import pointers_of
from cuflash.request.layouts import Boxes
from cuflash.request.problem import Call, Signature
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
    # Kept alive until the kernels are queued: after that, the stream's order
    # makes it safe to reuse the memory. So are copies.
    kept: Any = None
    buffers: list[int] = []
    if recipe.workspace:
        kept, buffers = backend.workspace(recipe.workspace)
    if shared:
        buffers = [*buffers, *backend.address(shared, written=True)]
    addresses = recipe.ordered((
        0, call.seed, call.cache_seqlens, *bits(call.mod_numbers),
        *backend.address(read), *backend.address(written, written=True),
        *buffers,
    ))  # fmt: skip
    if recipe.repeats:
        arguments = _arguments(recipe, backend.tensor_map, addresses)
    else:
        arguments = _filled(recipe, backend.tensor_map, addresses)
    backend.launch(recipe.loaded, arguments, recipe.template.kind)
    if written is not wanted:
        for result, copy in zip(wanted, written, strict=True):
            if copy is not result:
                backend.copy(result, copy)


class LaunchedForward:
    """A forward call without its data: new results, no options.

    Nothing is left to look up, which takes as long as the rest of a call.
    """

    # The pointers of its struct, then that of workspace, if it has one.
    POINTERS = "q", "k", "v", "out", "lse"
    WORKSPACE = ("key_parts",)

    def __init__(self, signature: Signature, recipe: Recipe) -> None:
        p = signature.problem
        self.recipe, self.loaded = recipe, recipe.loaded
        self.kind = recipe.template.kind
        self.out = out_shape_of(p), signature.layouts["q"].dtype
        lse = lse_shape_of(p), p.lse_dtype
        self.lse = lse if signature.return_lse else ()
        has_more = len(pointers_of(self.kind)) > len(self.POINTERS)
        self.others = (0,) * has_more

    def run(
        self, inputs: tuple[Any, Any, Any], backend: Backend
    ) -> tuple[Any, Any]:
        """out in full rank and, if wanted, lse; of q, k and v."""
        with backend.current():
            out = backend.rows(*self.out)
            lse = backend.empty(*self.lse) if self.lse else None
            kept: Any = None  # as in run()
            others: Sequence[int] = self.others
            if self.recipe.workspace:
                kept, others = backend.workspace(self.recipe.workspace)
            addresses = (
                *backend.address(inputs),
                *backend.address((out, lse), written=True),
                *others,
            )
            encode = backend.tensor_map
            arguments = _arguments(self.recipe, encode, addresses)
            backend.launch(self.loaded, arguments, self.kind)
        return out, lse


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
