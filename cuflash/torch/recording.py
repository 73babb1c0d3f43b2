"""Records score_mod and mask_mod with the tensors that they read.

Tensors of closures, globals and attributes are arrays, as those of
`mod_arrays` are: a mode of torch functions is told of each reading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cuflash.errors import DTypeError
from cuflash.expressions import nodes, trace
from cuflash.expressions.nodes import Node
from cuflash.expressions.rows import REDUCTIONS, Row, as_row
from cuflash.expressions.trace import (
    METHODS,
    ArrayKind,
    ArraySymbol,
    Several,
    Symbol,
)
from cuflash.request import traced

from .dtypes import NUMPY

# What functions may ask of a tensor: it is part of the key.
_ATTRIBUTES = "shape", "dtype", "device", "ndim", "is_cuda"
_METADATA = frozenset(
    (
        *(getattr(torch.Tensor, x).__get__ for x in _ATTRIBUTES),
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
        torch.Tensor.__len__, torch.Tensor.is_floating_point,
    )
)  # fmt: skip
_SIZES = frozenset(
    (
        torch.Tensor.shape.__get__, torch.Tensor.size,
        torch.Tensor.numel, torch.Tensor.__len__,
    )
)  # fmt: skip


class Graphs(NamedTuple):
    """What a call's functions are, apart from tensors.

    Attributes
    ----------
    roots : tuple of (str, Node)
        By the option's name.
    moved : tuple of str
        The arrays that have gradients.
    of_batch : bool
        Whether they depend on the position in the batch.
    """

    roots: tuple[tuple[str, Node], ...]
    moved: tuple[str, ...]
    of_batch: bool


class Recording(NamedTuple):
    """What recording functions found.

    Attributes
    ----------
    graphs : Graphs
    names : tuple of str
        Of the tensors that they read from outside.
    tensors : tuple of Tensor
        These tensors, by slot.
    of_mask, numbers_of_mask : tuple of int
        The slots of arrays and of numbers that a mask_mod reads.
    lasts : bool
        Whether it depends on no number of a tensor.
    sized : tuple of Tensor
        Those on whose sizes it depends.
    """

    graphs: Graphs
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    of_mask: tuple[int, ...]
    numbers_of_mask: tuple[int, ...]
    lasts: bool
    sized: tuple[torch.Tensor, ...]


class _Captured(Several, ArraySymbol):
    """A tensor from outside of a function; some of its indices may be known.

    Parameters
    ----------
    name, slot, kind
    sizes : tuple of int
    note : callable
        Called where the graph depends on its sizes.
    first : tuple of Node
        The indices that are known.
    """

    __slots__ = ("first", "note", "sizes")

    def __init__(
        self,
        name: str,
        slot: int,
        kind: ArrayKind,
        sizes: tuple[int, ...],
        note: Callable[[], None],
        first: tuple[Node, ...] = (),
    ) -> None:
        super().__init__(name, slot, kind)
        self.sizes, self.note, self.first = sizes, note, first

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple[Any, ...]:
        self.note()
        return self.sizes

    def __len__(self) -> int:
        self.note()
        return self.sizes[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
        several = tuple([x for x in key if x is not ...])
        if len(several) == len(self.sizes):  # an ellipsis stands for no axis
            key = several
        if len(key) > len(self.sizes):
            trace.refuse(
                f"a tensor with {self.kind.ndim} axes is read by"
                f" {len(self.first) + len(key)} indices",
                f"give {self.kind.ndim}",
            )
        indices = (*self.first, *map(self._index, key))
        if len(indices) == self.kind.ndim:
            return self._gather(indices)
        return _Captured(
            self.name, self.slot, self.kind, self.sizes[len(key) :],
            self.note, indices,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in METHODS or name in REDUCTIONS:
            return getattr(as_row(self), name)
        raise AttributeError(f"a tensor that is read has no {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Row.__torch_function__(function, types, args, kwargs)


class _Capture(TorchFunctionMode):
    """Takes the tensors that a function reads, while it is recorded.

    Parameters
    ----------
    first_slot : int
        That of the first of them.
    names : mapping
        Names of tensors by their ids, for errors.
    known : tuple of Tensor, or None
        Those that the key finds.
    """

    def __init__(
        self,
        first_slot: int,
        names: Mapping[int, str],
        known: list[torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.first_slot, self.names, self.known = first_slot, names, known
        self.tensors: list[torch.Tensor] = []
        # Those on whose sizes a result depends.
        self.sized: list[torch.Tensor] = []
        self.role = ""
        # Whether a result depends on numbers of tensors.
        self.is_changeable = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            tensor, key = args
            if isinstance(tensor, torch.Tensor) and _has_symbol(key):
                return self.array(tensor)[key]
        for ours in (Several, Symbol):
            for kind in types:
                if issubclass(kind, ours):
                    return kind.__torch_function__(
                        function, types, args, kwargs
                    )
        reads = any(isinstance(x, torch.Tensor) for x in args)
        if function is torch._C._set_grad_enabled and args == (False,):
            if self.role == "score_mod":
                trace.refuse(
                    "a part without gradients",
                    "all of a score is differentiated: read what is constant"
                    " from a tensor that does not require grad",
                )
        if function in _SIZES:
            self.sized.append(args[0])
        if (reads and function not in _METADATA) or _is_random(function):
            self.is_changeable = True
        return function(*args, **kwargs or {})

    def array(self, tensor: torch.Tensor) -> _Captured:
        """The symbol of a tensor; of one without axes, with one of size 1."""
        if all(x is not tensor for x in self.tensors):
            self.tensors.append(tensor)
        index = next(i for i, x in enumerate(self.tensors) if x is tensor)
        if tensor.dtype not in NUMPY:
            trace.refuse(
                f"a tensor of dtype {tensor.dtype}", "convert it: x.float()"
            )
        kind = ArrayKind(NUMPY[tensor.dtype].name, max(tensor.ndim, 1))
        sizes = tuple(tensor.shape) or (1,)
        slot = self.first_slot + index
        note = functools.partial(self.sized.append, tensor)
        return _Captured(self.name_of(tensor), slot, kind, sizes, note)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that is captured."""
        index = next(i for i, x in enumerate(self.tensors) if x is tensor)
        return self.names.get(id(tensor), f"tensor_{index}")

    def number(self, value: Any) -> Symbol | None:
        """The symbol of a tensor without axes."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.ndim:
            trace.refuse(
                f"a tensor of shape {tuple(value.shape)} is used as a number",
                "read an element of it: table[q_idx]",
            )
        is_new = self.known is not None and all(
            value is not x for x in self.known
        )
        if is_new and not self.is_changeable and not value.requires_grad:
            return Symbol(nodes.constant(value.item()))  # made by the function
        return self.array(value)[0]


def _has_symbol(key: Any) -> bool:
    several = key if isinstance(key, (tuple, list)) else (key,)
    return any(isinstance(x, Symbol) for x in several)


def _is_random(function: Any) -> bool:
    return function.__name__.startswith(("rand", "bernoulli", "normal"))


def recorded(
    functions: Mapping[str, Any],
    own: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    known: list[torch.Tensor] | None,
) -> Recording:
    """Record functions, with symbols.

    Parameters
    ----------
    functions : mapping of str to callable
        By the option's name.
    own : mapping of str to Tensor
        The arrays of `mod_arrays`.
    numbers : mapping
        Its numbers.
    known : list of Tensor, or None
        Those that are there before; other tensors without axes are made by a
        function, and are constants. None: nothing is known.

    Raises
    ------
    CuflashError
    """
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    given, unread = traced.given_of(_described(own), values)
    capture = _Capture(len(own), _names_of(functions, unread), known)
    roots: list[tuple[str, Node]] = []
    whole = {traced.name_of(n) for n, x in own.items() if not x.ndim}
    with capture, trace.capturing(capture.number):
        for role, function in functions.items():
            capture.role = role
            function = trace.with_numbers(function, whole)
            root, read = trace.record(function, role, given)
            roots.append((role, root))
            unread -= read
    traced.check_read(unread)
    names = tuple([traced.named(capture.name_of(x)) for x in capture.tensors])
    read_from = {**own, **dict(zip(names, capture.tensors, strict=True))}
    traced.given_of(_described(read_from), values)  # checks them
    hidden = dict(roots).get("mask_mod")
    graphs = Graphs(
        tuple(roots), moved_of(roots, read_from), reads_batch(roots)
    )
    return Recording(
        graphs,
        names,
        tuple(capture.tensors),
        _slots(hidden),
        tuple(sorted(_numbers_in(hidden))),
        not capture.is_changeable,
        tuple(capture.sized),
    )


def _described(arrays: Mapping[str, torch.Tensor]) -> tuple[tuple, ...]:
    """Tensors as `traced.given_of` takes arrays; numbers as they are read."""
    found = []
    for name, x in arrays.items():
        if x.dtype not in NUMPY:
            raise DTypeError(
                f"{name} has dtype {x.dtype}, which NumPy does not support"
            )
        shape = tuple(x.shape) or (1,)
        found.append((name, NUMPY[x.dtype], shape, (0,) * len(shape)))
    return tuple(found)


def _names_of(
    functions: Mapping[str, Any], taken: Iterable[str]
) -> dict[int, str]:
    """What functions call the tensors of their closures and globals."""
    found: dict[int, str] = {}
    used = {*taken}
    for function in functions.values():
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        space = function.__globals__
        outside = [(n, x.cell_contents) for n, x in cells if _is_set(x)]
        outside += [(n, space[n]) for n in names_in(function) if n in space]
        for name, x in outside:
            if isinstance(x, torch.Tensor) and name not in used:
                if found.setdefault(id(x), name) == name:
                    used.add(name)
    return found


def names_in(function: Any) -> tuple[str, ...]:
    """All names in a function's code, and in those inside it."""
    code = getattr(function, "__code__", None)
    stack = [code] if isinstance(code, CodeType) else []
    found: dict[str, None] = {}
    while stack:
        code = stack.pop()
        found |= dict.fromkeys(code.co_names)
        stack += [x for x in code.co_consts if isinstance(x, CodeType)]
    return tuple(found)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def moved_of(
    roots: Iterable[tuple[str, Node]], arrays: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """The arrays that have gradients: real ones that a score reads."""
    names = [*arrays]
    read = [names[i] for i in _slots(dict(roots).get("score_mod"))]
    return tuple([x for x in read if arrays[x].is_floating_point()])


def reads_batch(roots: Iterable[tuple[str, Node]]) -> bool:
    """Whether graphs depend on the position in the batch."""
    return any("b" in x.depends for _, x in roots)


def _numbers_in(root: Node | None) -> set[int]:
    """The slots of the numbers that a graph reads."""
    if root is None:
        return set()
    every = nodes.in_order([root])
    return {x.value for x in every if x.op == "number"}


def _slots(root: Node | None) -> tuple[int, ...]:
    """The slots of the arrays that a graph reads."""
    if root is None:
        return ()
    return tuple(sorted({x.value[0] for x in nodes.gathers([root])}))
