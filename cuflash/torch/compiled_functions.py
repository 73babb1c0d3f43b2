"""A user's score_mod and mask_mod in code that torch compiles.

Dynamo does not trace them: they are recorded while it traces the call, and
their graphs, as text, are part of the program. What it does trace is how a
call finds the tensors that functions close over, so that they are inputs of
the program, and the numbers, on which it depends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from cuflash.errors import UnsupportedError
from cuflash.expressions import serial
from cuflash.request import traced

from .recording import names_in, recorded

_MOST_STEPS = 6
_NUMBERS = bool, int, float, str


class Program(NamedTuple):
    """What the operator takes.

    Attributes
    ----------
    arrays : list of Tensor
    numbers : list of float
    text : str
        The graphs.
    """

    arrays: list[torch.Tensor]
    numbers: list[Any]
    text: str


def taken(
    options: dict[str, Any], arrays: dict[str, torch.Tensor]
) -> Program | None:
    """As `functions.taken`, in code that is compiled."""
    score = options.pop("score_mod", None)
    hidden = options.pop("mask_mod", None)
    numbers = options.pop("mod_arrays", {})
    own = {}
    for name in list(arrays):
        if traced.is_named(name):
            own[name] = arrays.pop(name)
    if score is None and hidden is None:
        return None
    if isinstance(hidden, Blocks):
        own[_BLOCKS] = hidden.table
        size, hidden = hidden.size, hidden.mask_mod
    else:
        size = None
    for function in (score, hidden):
        if not _has_closure(function):
            torch._dynamo.graph_break(msg=_MADE_INSIDE)
    kinds = tuple([(n, x.dtype, x.ndim) for n, x in own.items()])
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    text, places, constants = _found(score, hidden, size, kinds, values)
    for role, path, value in constants:
        function = score if role == "score_mod" else hidden
        if _follow(function, path) != value:  # the program depends on it
            raise UnsupportedError("a number has changed while it was traced")
    found = list(own.values())
    for role, path in places:
        function = score if role == "score_mod" else hidden
        x = _follow(function, path)
        found.append(x.reshape(1) if x.ndim == 0 else x)
    return Program(found, list(numbers.values()), text)


_MADE_INSIDE = (
    "a score_mod or mask_mod that closes over something is made in the"
    " function that is compiled, where its tensors cannot be found: make it"
    " outside, or pass them by mod_arrays and name them among its arguments"
)


def _has_closure(function: Any) -> bool:
    """Whether Dynamo tells what a function closes over, if it does."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_freevars:
        return True
    try:  # hasattr() is True
        return function.__closure__ is not None
    except AttributeError:
        return False


class Blocks(NamedTuple):
    """A mask of blocks.

    Attributes
    ----------
    mask_mod : callable
    table : Tensor of uint8, (batch or 1, heads or 1, rows, columns)
        0 for a block that is hidden, 1 where mask_mod decides, 2 for one
        that is visible.
    size : tuple
        Queries and keys of a block; whether the table has more than one batch
        element, and more than one head.
    """

    mask_mod: Any
    table: torch.Tensor
    size: tuple[int, int, bool, bool]


def visible_in(
    table: Any, mask_mod: Any, size: tuple[Any, ...], indices: tuple[Any, ...]
) -> Any:
    """The mask of blocks at a pair."""
    b, h, q_idx, kv_idx = indices
    rows, columns, of_batch, of_head = size
    kind = table[
        b if of_batch else 0, h if of_head else 0, q_idx // rows,
        kv_idx // columns,
    ]  # fmt: skip
    return (kind == 2) | ((kind == 1) & mask_mod(*indices))


_BLOCKS = traced.named("table_of_blocks")

Path = tuple[tuple[str, Any], ...]


@torch.compiler.assume_constant_result
def _found(
    score: Any,
    hidden: Any,
    size: tuple[Any, ...] | None,
    kinds: tuple[tuple[Any, ...], ...],
    values: tuple[tuple[str, type], ...],
) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """The graphs, the paths to tensors, and those to numbers with values."""
    given = {"score_mod": score, "mask_mod": hidden}
    given = {n: x for n, x in given.items() if x is not None}
    whole = dict(given)
    if size is not None:
        whole["mask_mod"] = _with_argument(hidden, size)
    own = {
        n: torch.empty((1,) * ndim, dtype=dtype) for n, dtype, ndim in kinds
    }
    numbers = {n: kind() for n, kind in values}
    places, constants, known = [], [], []
    tensors: dict[int, tuple[str, Path]] = {}
    for role, function in given.items():
        for path, value in _reached(function):
            if isinstance(value, torch.Tensor):
                tensors.setdefault(id(value), (role, path))
                known.append(value)
            else:
                constants.append((role, path, value))
    found = recorded(whole, own, numbers, known)
    roots = serial.dumps(found.graphs.roots)
    for name, x in zip(found.names, found.tensors, strict=True):
        if id(x) not in tensors:
            raise UnsupportedError(
                f"{traced.name_of(name)} is read in compiled code, expected a"
                " variable of a closure, a global or an attribute: pass it by"
                " mod_arrays, and name it among the function's arguments"
            )
        places.append(tensors[id(x)])
    return roots, tuple(places), tuple(constants)


def _with_argument(mask_mod: Any, size: tuple[Any, ...]) -> Any:
    """The mask of blocks, whose table is named."""

    def visible(*indices: Any, table_of_blocks: Any) -> Any:
        return visible_in(table_of_blocks, mask_mod, size, indices)

    return visible


def _reached(function: Any) -> Iterator[tuple[Path, Any]]:
    """Tensors and numbers that a function may read, with their paths."""
    seen: set[int] = set()
    queue: list[tuple[Path, Any]] = [((), function)]
    names = {*names_in(function)}
    while queue:
        path, value = queue.pop(0)
        if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
            yield path, value
            continue
        if id(value) in seen or len(path) > _MOST_STEPS:
            continue
        seen.add(id(value))
        names |= {*names_in(value)}
        for step, inner in _within(value, names):
            queue.append(((*path, step), inner))


def _within(
    value: Any, names: set[str]
) -> Iterator[tuple[tuple[str, Any], Any]]:
    """What a value leads to."""
    if isinstance(value, FunctionType):
        for i, cell in enumerate(value.__closure__ or ()):
            try:
                yield ("cell", i), cell.cell_contents
            except ValueError:  # not assigned so far
                continue
        space = value.__globals__
        for name in names_in(value):
            if name in space:
                yield ("global", name), space[name]
    elif isinstance(value, MethodType):
        yield ("attribute", "__func__"), value.__func__
        yield ("attribute", "__self__"), value.__self__
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            yield ("item", i), x
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        own: Mapping[str, Any] = vars(value)
        if isinstance(value, torch.nn.Module):
            own = {**own, **value._parameters, **value._buffers}
            own |= value._modules
        for name in names:
            if name in own and type(value).__module__ != "torch":
                yield ("attribute", name), own[name]


def _follow(value: Any, path: Path) -> Any:
    """What a path leads to; traced by the compiler."""
    for kind, step in path:
        if kind == "cell":
            value = value.__closure__[step].cell_contents
        elif kind == "global":
            value = value.__globals__[step]
        elif kind == "attribute":
            value = getattr(value, step)
        else:
            value = value[step]
    return value
