"""A `Recipe`: all decisions about the calls of one signature.

The address that a pointer needs is found by the pointer's name, once: a
repeated call only fills in addresses (run.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from cuflash import settings
from cuflash.backends.base import Target
from cuflash.launch import structs
from cuflash.launch.directions import DIRECTIONS
from cuflash.launch.template import Template
from cuflash.plans.arguments import parts_of
from cuflash.plans.expression import (
    after_found,
    bytes_of_sum,
    found_of_mask,
    key_of_found,
    sums_exactly,
)
from cuflash.plans.plan import FamilyName, Plan, plan
from cuflash.plans.tiles import Tile
from cuflash.request import layouts, options, traced
from cuflash.request.layouts import Boxes
from cuflash.request.problem import Layout, Problem, Signature

remembered = functools.lru_cache(maxsize=4096)

Layouts = Mapping[str, Layout]
_Take = Callable[[Mapping[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Recipe:
    """All decisions about the calls of one signature.

    Attributes
    ----------
    decided : Plan
    loaded
        The plan's kernels, as the backend launches them.
    template : Template
        The kernels' argument struct, without addresses.
    copies : mapping of str to Layout
        The arrays that kernels cannot access in place, and the layouts of
        their copies.
    reads, writes : tuple of str
        The arrays that kernels read, by their names in a call (a tangent's is
        ``q_dot``), and those that they write.
    workspace : tuple of int
        Bytes of the buffers that they need between.
    inputs, options, tangents, results : callable
        What `reads` and `writes` name, in order, of such a mapping of a call,
        and of its results. None if there are no options or no tangents.
    ordered : callable
        Puts in the order of the struct's pointers: null, the seed, the one
        length of caches, the numbers of `mod_arrays`, the addresses of
        `reads`, of `writes` and of buffers, those that are kept last.
    boxes : tuple of (int, Boxes)
        The indices of the pointers that have a TensorMap too.
    repeats : bool
        Whether arguments are kept by their addresses: no number among them,
        a seed or a length, differs from call to call.
    keeps : Keeps or None
        What its calls share with later ones, if they may (kept.py).
    """

    decided: Plan
    loaded: Any
    template: Template
    copies: Layouts
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    workspace: tuple[int, ...]
    inputs: _Take
    options: _Take | None
    tangents: _Take | None
    results: _Take
    ordered: Callable[[tuple[int, ...]], tuple[int, ...]]
    boxes: tuple[tuple[int, Boxes], ...]
    repeats: bool
    keeps: Keeps | None = None


@dataclass(frozen=True, eq=False)
class Keeps:
    """What calls with one user's mask share.

    Attributes
    ----------
    nbytes : tuple of int
        Bytes of the buffers, whose addresses follow those of the workspace.
    key : object
        Stands for what they depend on, of a plan.
    again : Recipe
        That of a call for which they are filled already.
    """

    nbytes: tuple[int, ...]
    key: object
    again: Recipe


# What `Recipe.ordered` takes before addresses.
_FIRST = (
    "null", "seed", "cache_seqlen",
    *(f"mod_numbers[{i}]" for i in range(traced.MOST)),
)  # fmt: skip


# ---- Plans ----


def decide(p: Problem, target: Target, family: FamilyName | None) -> Plan:
    """The plan for a problem on a target; logged the first time."""
    decided = plan(p, target.device(), family)
    _log(decided, target)
    return decided


@remembered
def _log(decided: Plan, target: Target) -> None:
    settings.logger().info("%s", decided)


# ---- Recipes ----


def layouts_of(
    signature: Signature,
    results: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Layout]:
    """The layouts of all arrays of a signature's calls, by name.

    `results` are the shapes of results; those that the user does not give are
    new arrays of q's dtype.
    """
    given = {
        **signature.layouts,
        **signature.options,
        **{f"{name}_dot": x for name, x in signature.tangents.items()},
    }
    for name, shape in (results or {}).items():
        if name not in given:
            given[name] = layouts.new(shape, given["q"].dtype)
    return given


def recipe_of(
    signature: Signature,
    target: Target,
    decided: Plan,
    given: Layouts,
    taken: Layouts,
    writes: Iterable[str],
    constants: Mapping[str, Any] | None = None,
    *,
    direction: str = "",
    sources: Mapping[str, str] | None = None,
    keeps: bool = False,
) -> Recipe:
    """The recipe of a signature's calls.

    Parameters
    ----------
    signature : Signature
    target : Target
    decided : Plan
    given, taken : mapping of str to Layout
        The arrays (`layouts_of`), and as kernels access them; options among
        these only if not as `options.as_read` says.
    writes : iterable of str
        The results that kernels write.
    constants : mapping of str to object, optional
        The struct's fields that are no pointers, but for what `_constants`
        finds.
    direction : str, optional
        Of `DIRECTIONS`, by default the problem's.
    sources : mapping of str to str, optional
        The arrays that pointers of other names lead to.
    keeps : bool, optional
        Whether calls leave what they find out about a user's mask to others.
    """
    direction = direction or signature.problem.direction
    row = DIRECTIONS[direction]
    parts = parts_of(signature.problem, decided.record)
    kind = structs.chosen(direction, parts)
    pointers, written = structs.pointers_of(kind), {*writes}
    nbytes = {x.name: x.nbytes for x in decided.workspace}
    nbytes |= _bytes_of_sums(signature)
    row.check(pointers, written, nbytes)
    sources = {**row.arguments, **(sources or {}), **{x: x for x in written}}
    names = {x: sources.get(x, x) for x in pointers}
    taken = {**options.as_read(signature), **taken}
    fields = _constants(kind, signature, decided, taken)
    results = _among(names, written)
    others = [x for x in dict.fromkeys(names.values()) if x not in written]
    inputs = _among(others, signature.layouts)
    of_options = _among(others, signature.options)
    moves = _among(others, _moving(signature))
    found = {x.name: x for x in found_of_mask(decided)} if keeps else {}
    kept = _among(others, found)
    between = tuple(x for x in _among(others, nbytes) if x not in found)
    reads = (*inputs, *of_options, *moves)
    sources_of = *_FIRST, *reads, *results, *between, *kept
    index = {x: i for i, x in enumerate(sources_of)}
    recipe = Recipe(
        decided,
        target.load(decided),
        Template(kind, **{**fields, **(constants or {})}),
        layouts.changes(given, taken),
        reads,
        results,
        tuple(nbytes[x] for x in between),
        _take(inputs),
        _take(of_options) if of_options else None,
        _take([x.removesuffix("_dot") for x in moves]) if moves else None,
        _take(results),
        itemgetter(*(index.get(x, 0) for x in names.values())),
        _boxes(kind, pointers, taken, decided.tile),
        not (
            signature.problem.dropout
            or signature.problem.mod_numbers
            or "cache_seqlen" in names
        ),
    )
    if not kept:
        return recipe
    later = after_found(decided)
    again = replace(recipe, decided=later, loaded=target.load(later))
    sizes = tuple(found[x].nbytes for x in kept)
    key = _standing_for(key_of_found(decided))
    return replace(recipe, keeps=Keeps(sizes, key, again))


@remembered
def _standing_for(key: tuple[Any, ...]) -> object:
    """One object for equal keys, whose hash takes as long as a launch."""
    return object()


def _bytes_of_sums(signature: Signature) -> dict[str, int]:
    """The workspace whose size follows from the shapes of arrays."""
    p = signature.problem
    if not sums_exactly(p):
        return {}
    sizes = traced.gradient_sizes(signature)
    return {f"dmod_sums[{i}]": bytes_of_sum(p) * n for i, n in sizes.items()}


def _among(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    kept = set(known)
    return tuple(x for x in names if x in kept)


def _moving(signature: Signature) -> Iterable[str]:
    """The tangents that kernels read; without directions, none."""
    moves = signature.problem.tangents
    if not moves or moves.count == 0:
        return ()
    return [f"{name}_dot" for name in signature.tangents]


def _take(names: Sequence[str]) -> _Take:
    """As itemgetter, but a tuple of one for one name."""
    first, *others = names
    return itemgetter(*names) if others else lambda x: (x[first],)


def _constants(
    kind: np.dtype, signature: Signature, decided: Plan, taken: Layouts
) -> dict[str, Any]:
    """The fields of a struct that follow from their names."""
    p = signature.problem
    own = kind.names or ()
    arrays = kind["arrays"].names if "arrays" in own else None
    fields = {*own, *(arrays or ())}
    found = {
        "shape": (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q,
                  p.num_heads_kv, p.head_dim, p.head_dim_v),
        "schedule": (decided.heads_per_section, decided.last_section),
        "scale": p.scale,
        "work_items": decided.work_items,
        "num_splits": decided.num_splits,
    }  # fmt: skip
    if "options" in fields:
        found["options"] = options.numbers(signature, taken)
    if "expression" in fields:
        found["expression"] = traced.array_numbers(p.mod_arrays, taken)
    rows = {x: y for x, y in taken.items() if len(y.shape) == 4}
    found |= layouts.row_strides(rows)
    return {name: x for name, x in found.items() if name in fields}


# The rows of a TensorMap's boxes: a tile's, or those that a warp stores.
_TILES_OF_ROWS = {
    **dict.fromkeys(("q", "dout", "q_dot"), "block_q"),
    **dict.fromkeys(("k", "v", "k_dot", "v_dot"), "block_k"),
}
_ROWS_STORED = 16


def _boxes(
    kind: np.dtype,
    pointers: tuple[str, ...],
    taken: Layouts,
    tile: Tile | None,
) -> tuple[tuple[int, Boxes], ...]:
    """The boxes of a struct's TensorMaps.

    One of a tangent has the directions and batches as one axis. That of a
    missing tangent is its input's, which no kernel reads.
    """
    found = []
    for name in structs.maps_of(kind):
        if name not in _TILES_OF_ROWS:
            rows = _ROWS_STORED
        else:
            rows = getattr(tile, _TILES_OF_ROWS[name])
        if name not in taken:
            name = name.removesuffix("_dot")
        layout = taken[name]
        if name.endswith("_dot"):
            layout = layouts.folded(layout)
        found.append((pointers.index(name), Boxes.of(layout, rows)))
    return tuple(found)
