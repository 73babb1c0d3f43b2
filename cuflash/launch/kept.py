"""Runs calls that share flags of tiles: those with one `TileMask`.

The first call's kernels write the flags to memory that the `TileMask` keeps;
later calls on the same stream launch the kernels after these alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash.backends.base import Backend
from cuflash.launch.recipe import Recipe
from cuflash.launch.run import run
from cuflash.request.problem import Call


def run_keeping(
    recipe: Recipe, call: Call, backend: Backend, results: Mapping[str, Any]
) -> None:
    """Launch a recipe's kernels, or those of its `again`."""
    keeps = recipe.keeps
    if keeps is None or call.kept is None:
        run(recipe, call, backend, results)
        return
    queue = backend.queue()
    key = (keeps.key, backend.target, queue)
    memory = None if queue is None else call.kept.get(key)
    if memory is not None:
        run(keeps.again, call, backend, results, memory)
        return
    memory = tuple(backend.empty((n,), "uint8") for n in keeps.nbytes)
    run(recipe, call, backend, results, memory)
    if queue is not None:  # not before: a launch may raise
        call.kept.put(key, memory)
