"""A user's score_mod and mask_mod in code that torch compiles.

Dynamo does not trace them: they are recorded while it traces the call, and
their graphs, as text, are part of the program. What it does trace is how a
call finds the tensors that functions close over, so that they are inputs of
the program, and the numbers, on which it depends.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from cuflash.errors import UnsupportedError
from cuflash.expressions import serial
from cuflash.request import traced

from . import functions
from .functions import readable
from .reached import Path, Reached, UnguardedError
from .recording import recorded


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


def own_or_program(
    options: dict[str, Any],
    arrays: dict[str, torch.Tensor],
    q: torch.Tensor,
) -> tuple[functions.Functions | None, Program | None]:
    """As `functions.taken`: what eager mode takes, or what the operator does.

    Calls inside a transform of torch.func run in eager mode.
    """
    if torch._C._are_functorch_transforms_active():
        return functions.taken_in_eager_mode(options, arrays, q), None
    if torch.compiler.is_compiling():
        return None, taken(options, arrays, q)
    return functions.taken(options, arrays, q), None


def taken(
    options: dict[str, Any],
    arrays: dict[str, torch.Tensor],
    q: torch.Tensor,
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
        if not _is_made_outside(function):
            torch._dynamo.graph_break(msg=_MADE_INSIDE)
        if not (TAKES_OBJECTS or _is_plain(function)):
            torch._dynamo.graph_break(msg=_OBJECT)
            return _at_each_call(score, hidden, size, own, numbers, q)
    kinds = tuple([(n, x.dtype, x.ndim) for n, x in own.items()])
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    unguarded, text, places, constants, fixed, shapes = _found(
        *_apart(score), *_apart(hidden), size, kinds, values
    )
    for role, path, value in constants:
        now = _follow(score if role == "score_mod" else hidden, path)
        # The program depends on it. A NaN equals nothing.
        if now != value and (now == now or value == value):
            raise UnsupportedError("a number has changed while it was traced")
    for role, path in fixed:
        if _follow(score if role == "score_mod" else hidden, path) is None:
            raise UnsupportedError(
                "a function has changed while it was traced"
            )
    for role, path, shape in shapes:
        now = _follow(score if role == "score_mod" else hidden, path)
        if not _equal(now.shape, shape):
            raise UnsupportedError("a size has changed while it was traced")
    found = [x if x.ndim else x.reshape(1) for x in own.values()]
    for role, path in places:
        x = _follow(score if role == "score_mod" else hidden, path)
        if x.ndim == 0:
            x = x.reshape(1).to(q.device)
        elif x.device != q.device:
            unguarded = "a score_mod or mask_mod reads another device's tensor"
        found.append(x)
    if unguarded:
        torch._dynamo.graph_break(msg=unguarded)
        return _at_each_call(score, hidden, size, own, numbers, q)
    return Program(found, list(numbers.values()), text)


def _equal(shape: Any, other: tuple[int, ...]) -> bool:
    """Whether sizes are the same; PyTorch 2.11 compares no tuples of them."""
    if len(shape) != len(other):
        return False
    for i, size in enumerate(other):
        if shape[i] != size:
            return False
    return True


_MADE_INSIDE = (
    "a score_mod or mask_mod that closes over something is made in the"
    " function that is compiled, where its tensors cannot be found: make it"
    " outside, or pass them by mod_arrays and name them among its arguments"
)


# What `_found` takes: before this version functions, and no objects.
TAKES_OBJECTS = torch.__version__ >= (2, 13)

_OBJECT = (
    "a score_mod or mask_mod is a method, a partial or another object, which"
    " compiled code takes with PyTorch 2.13 or newer: pass a function, and"
    " what it reads by mod_arrays"
)


def _is_plain(function: Any) -> bool:
    return function is None or isinstance(function, FunctionType)


def _is_made_outside(function: Any) -> bool:
    """Whether Dynamo knows what a function closes over.

    Before PyTorch 2.14 it answers; since then it breaks the graph here, and
    with fullgraph its error names this function.
    """
    code = getattr(function, "__code__", None)
    if code is None or not code.co_freevars:
        return True
    try:  # PyTorch 2.11: one that is made inside has every attribute
        function.none_has_this  # noqa: B018
        return False
    except AttributeError:
        pass
    try:  # PyTorch 2.13: it has none of these. hasattr() is True
        return isinstance(function.__globals__, dict)
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

_NOTHING: tuple[Any, ...] = "", (), (), (), ()


def _apart(function: Any) -> tuple[Any, Any]:
    """A function, and its owner if it is a method: Dynamo passes no method."""
    if isinstance(function, MethodType):
        return function.__func__, function.__self__
    return function, None


@torch.compiler.assume_constant_result
def _found(
    score: Any,
    owner_of_score: Any,
    hidden: Any,
    owner_of_hidden: Any,
    size: tuple[Any, ...] | None,
    kinds: tuple[tuple[Any, ...], ...],
    values: tuple[tuple[str, type], ...],
) -> tuple[Any, ...]:
    """What the program is made of.

    Returns
    -------
    unguarded : str
        Why it may change without being seen; "" if it may not.
    text : str
        The graphs.
    places, constants, fixed, shapes : tuple
        The paths to tensors; to constants, with their values; to functions
        of libraries; to tensors on whose sizes graphs depend, with these.
    """
    if owner_of_score is not None:
        score = MethodType(score, owner_of_score)
    if owner_of_hidden is not None:
        hidden = MethodType(hidden, owner_of_hidden)
    return _program_of(score, hidden, size, kinds, values)


@torch.compiler.disable  # where the graph breaks at `_found`
def _program_of(
    score: Any,
    hidden: Any,
    size: tuple[Any, ...] | None,
    kinds: tuple[tuple[Any, ...], ...],
    values: tuple[tuple[str, type], ...],
) -> tuple[Any, ...]:
    given = {"score_mod": score, "mask_mod": hidden}
    given = {n: x for n, x in given.items() if x is not None}
    own = {
        n: torch.empty((1,) * ndim, dtype=dtype) for n, dtype, ndim in kinds
    }
    numbers = {n: kind() for n, kind in values}
    constants: list[Any] = []
    fixed: list[Any] = []
    tensors: dict[int, tuple[str, Path]] = {}
    known: list[torch.Tensor] = []
    try:
        for role, function in given.items():
            reached = Reached(function)
            constants += [(role, *x) for x in reached.constants]
            fixed += [(role, x) for x in reached.fixed]
            for path, x in reached.tensors:
                tensors.setdefault(id(x), (role, path))
                known.append(x)
    except UnguardedError as error:
        return _unguarded(str(error)), *_NOTHING
    found = recorded(_whole(given, size), own, numbers, known)
    if not found.lasts:
        return _unguarded("a number of a tensor"), *_NOTHING
    for name, x in zip(found.names, found.tensors, strict=True):
        if id(x) not in tensors:
            return _unguarded(traced.name_of(name)), *_NOTHING
    places = [tensors[id(x)] for x in found.tensors]
    sized = {id(x): x for x in found.sized if id(x) in tensors}
    shapes = [(*tensors[i], tuple(x.shape)) for i, x in sized.items()]
    text = serial.dumps(found.graphs.roots)
    return (
        "", text, tuple(places), tuple(constants), tuple(fixed), tuple(shapes)
    )  # fmt: skip


def _unguarded(what: str) -> str:
    return (
        f"a score_mod or mask_mod reads {what}, which compiled code cannot"
        " compare with what it was: pass it by mod_arrays, and name it among"
        " the function's arguments"
    )


@torch.compiler.disable
def _at_each_call(
    score: Any,
    hidden: Any,
    size: tuple[Any, ...] | None,
    own: dict[str, torch.Tensor],
    numbers: dict[str, Any],
    q: torch.Tensor,
) -> Program:
    """The program of functions that are recorded in each call."""
    given = {"score_mod": score, "mask_mod": hidden}
    given = {n: x for n, x in given.items() if x is not None}
    found = recorded(_whole(given, size), own, numbers, None)
    read = zip(found.names, found.tensors, strict=True)
    held = (x if x.ndim else x.reshape(1) for x in own.values())
    arrays = [*held, *(readable(n, x, q) for n, x in read)]
    text = serial.dumps(found.graphs.roots)
    return Program(arrays, list(numbers.values()), text)


def _whole(
    given: dict[str, Any], size: tuple[Any, ...] | None
) -> dict[str, Any]:
    if size is None:
        return given
    return given | {"mask_mod": _with_argument(given["mask_mod"], size)}


def _with_argument(mask_mod: Any, size: tuple[Any, ...]) -> Any:
    """The mask of blocks, whose table is named."""

    def visible(*indices: Any, table_of_blocks: Any) -> Any:
        return visible_in(table_of_blocks, mask_mod, size, indices)

    return visible


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
