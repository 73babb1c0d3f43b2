"""A user's score_mod and mask_mod on tensors: their graphs, what they read.

Tensors that a function closes over, or finds in globals and attributes, are
arrays of the call, as those of `mod_arrays` are. A function is recorded once;
later calls find its graph by its code and by what the code reads, and collect
the tensors again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cuflash.errors import DTypeError, ValueRangeError
from cuflash.expressions import nodes, trace
from cuflash.expressions.nodes import Node
from cuflash.expressions.remember import Attributes, fingerprint
from cuflash.expressions.trace import ArrayKind, ArraySymbol, Symbol
from cuflash.expressions.watch import Watch
from cuflash.request import traced
from cuflash.request.kept import Kept

from .checks import check_tensors
from .dtypes import NUMPY

_ROLES = "score_mod", "mask_mod"

# What functions may ask of a tensor: it is part of the key.
_ATTRIBUTES = "shape", "dtype", "device", "ndim", "is_cuda"
_METADATA = frozenset(
    (
        *(getattr(torch.Tensor, x).__get__ for x in _ATTRIBUTES),
        torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
        torch.Tensor.__len__, torch.Tensor.is_floating_point,
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


class Functions(NamedTuple):
    """A call's functions.

    Attributes
    ----------
    graphs : Graphs
    arrays : dict of str to Tensor
        In the order of slots; the names are those of errors.
    numbers : dict
        Those of `mod_arrays`, in the order of slots.
    kept : Kept or None
        What calls with the same block mask share.
    """

    graphs: Graphs
    arrays: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    kept: Kept | None = None

    def as_options(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call on these arrays in place of the tensors."""
        values = self.numbers.values()
        read = traced.of_slots(arrays, self.numbers, [*values])
        return {**dict(self.graphs.roots), **read}


class Snapshot:
    """What calls with one block mask share, until what it reads changes.

    Parameters
    ----------
    mask_mod : callable
        The whole mask.
    """

    def __init__(self, mask_mod: Any) -> None:
        self.mask_mod = mask_mod
        self._read: list[tuple[torch.Tensor, int]] = []
        self._kept = Kept()

    def kept_for(self, tensors: Iterable[torch.Tensor]) -> Kept:
        """What to share for a mask that reads these tensors."""
        now = [(x, version_of(x)) for x in tensors]
        before = self._read
        if len(now) != len(before) or any(
            x is not y or n != m
            for (x, n), (y, m) in zip(now, before, strict=True)
        ):
            self._read, self._kept = now, Kept()
        return self._kept


def version_of(x: Any) -> int:
    """How often a tensor has changed in place, as far as that is known."""
    if not isinstance(x, torch.Tensor) or x.is_inference():
        return 0
    return x._version


# ---- Recording ----


class _Captured(ArraySymbol):
    """A tensor from outside of a function; some of its indices may be known.

    Parameters
    ----------
    name, slot, kind
    sizes : tuple of int
    first : tuple of Node
        The indices that are known.
    """

    __slots__ = ("first", "sizes")

    def __init__(
        self,
        name: str,
        slot: int,
        kind: ArrayKind,
        sizes: tuple[int, ...],
        first: tuple[Node, ...] = (),
    ) -> None:
        super().__init__(name, slot, kind)
        self.sizes, self.first = sizes, first

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.sizes

    def __len__(self) -> int:
        return self.sizes[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
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
            self.name, self.slot, self.kind, self.sizes[len(key) :], indices
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        both = all(isinstance(x, cls) and x.ndim == 1 for x in args)
        if function.__name__ in ("dot", "inner", "vdot") and both:
            a, b = args
            return sum(x * y for x, y in zip(a, b, strict=True))
        row = next(x for x in args if isinstance(x, cls))
        return row._used()


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
        # Whether a result depends on numbers of tensors.
        self.is_changeable = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            tensor, key = args
            if isinstance(tensor, torch.Tensor) and _has_symbol(key):
                return self.array(tensor)[key]
        for kind in types:
            if issubclass(kind, (Symbol, _Captured)):
                return kind.__torch_function__(function, types, args, kwargs)
        reads = any(isinstance(x, torch.Tensor) for x in args)
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
        return _Captured(self.name_of(tensor), slot, kind, sizes)

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


class _Collected:
    """What a key says of tensors and modules; it lists the tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> None:
        """See `remember.Look`."""
        self.tensors.clear()

    def of(self, value: Any) -> Any:
        """See `remember.Look`."""
        if isinstance(value, torch.Tensor):
            for index, known in enumerate(self.tensors):
                if known is value:
                    return torch.Tensor, index
            self.tensors.append(value)
            index = len(self.tensors) - 1
            return torch.Tensor, index, value.dtype, value.shape, value.device
        if isinstance(value, torch.nn.Module):
            number = _MODULES.get(value)
            if number is None:
                number = _MODULES[value] = next(_numbers)
            bases = type(value).__mro__
            bases = bases[: bases.index(torch.nn.Module)]
            spaces = vars(value), value._parameters, value._buffers
            spaces = *spaces, value._modules, *map(vars, bases)
            return Attributes((torch.nn.Module, number), spaces)
        if type(value) in _STEADY:
            return value
        return None


# Identities that keep no module alive.
_MODULES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_STEADY = torch.dtype, torch.device


class _Key:
    """A function's fingerprint, the tensors in it, and what it is made of.

    Attributes
    ----------
    value : object
        None: there is none.
    tensors : list of Tensor
    """

    __slots__ = ("_metadata", "_watch", "tensors", "value")

    def __init__(self, function: Any) -> None:
        look, self._watch = _Collected(), Watch()
        found = fingerprint(function, look, self._watch)
        # By a number: it is looked up in each call.
        self.value = None if found is None else _number_of(found)
        self.tensors = look.tensors
        self._metadata = [(x, x.dtype, x.shape) for x in look.tensors]

    def holds(self) -> bool:
        """Whether the function would have the same."""
        if self.value is None or not self._watch.holds():
            return False
        for x, dtype, shape in self._metadata:
            if x.dtype is not dtype or x.shape != shape:
                return False
        return True


_NUMBER_OF: dict[Any, int] = {}
_KEYS: weakref.WeakKeyDictionary[Any, _Key] = weakref.WeakKeyDictionary()


def _number_of(found: Any) -> int:
    if len(_NUMBER_OF) >= _MOST_RECORDED:
        _NUMBER_OF.clear()
    return _NUMBER_OF.setdefault(found, next(_numbers))


def _key_of(function: Any) -> _Key:
    """A function's key, by one look-up where nothing has changed."""
    if type(function) is not FunctionType:
        return _Key(function)
    found = _KEYS.get(function)
    if found is None or not found.holds():
        found = _KEYS[function] = _Key(function)
    return found


class _Recorded(NamedTuple):
    """What is remembered of functions.

    Attributes
    ----------
    graphs : Graphs
    names : tuple of str
        Of the arrays that they read from outside.
    picked : tuple of int
        Which of the tensors that their key lists these are.
    of_mask : tuple of int
        The slots that a mask_mod reads.
    """

    graphs: Graphs
    names: tuple[str, ...]
    picked: tuple[int, ...]
    of_mask: tuple[int, ...]


_RECORDED: dict[Any, _Recorded] = {}
_MOST_RECORDED = 4096


def taken(
    options: dict[str, Any],
    arrays: dict[str, torch.Tensor],
    q: torch.Tensor | None,
) -> Functions | None:
    """The functions of a call, taken out of its options and arrays.

    Parameters
    ----------
    options : dict
        Those that are no arrays.
    arrays : dict of str to Tensor
        Those of `mod_arrays` among others.
    q : Tensor or None
        None: tensors may be anywhere.

    Returns
    -------
    Functions or None
        None without functions.

    Raises
    ------
    CuflashError
    """
    functions = {x: options.pop(x) for x in _ROLES if x in options}
    shared = getattr(functions.get("mask_mod"), "snapshot", None)
    if isinstance(shared, Snapshot):
        functions["mask_mod"] = shared.mask_mod
    numbers = options.pop("mod_arrays", {})
    own = {x: arrays.pop(x) for x in [*arrays] if traced.is_named(x)}
    check_tensors(own if q is None else {"q": q, **own})
    if not functions:
        if own or numbers:
            traced.recorded({"mod_arrays": numbers, **own})  # refuses them
        return None
    keys = [*map(_key_of, functions.values())]
    tensors = [x for key in keys for x in key.tensors]
    key = (
        *[(role, x.value) for role, x in zip(functions, keys, strict=True)],
        *map([*map(id, tensors)].index, map(id, tensors)),  # which are one
        *[(n, x.dtype, x.ndim) for n, x in own.items()],
        *[(n, type(x)) for n, x in numbers.items()],
    )
    recorded, lasts = _RECORDED.get(key), True
    if recorded is not None:
        captured = [tensors[i] for i in recorded.picked]
    else:
        known = None if any(x.value is None for x in keys) else tensors
        recorded, captured, lasts = _recorded(functions, own, numbers, known)
        if lasts:
            if len(_RECORDED) >= _MOST_RECORDED:
                _RECORDED.clear()
            _RECORDED[key] = recorded
    kept = None
    if isinstance(shared, Snapshot) and lasts:
        read = (*own.values(), *captured)
        kept = shared.kept_for([read[i] for i in recorded.of_mask])
    for name, x in zip(recorded.names, captured, strict=True):
        own[name] = x if q is None else _readable(name, x, q)
    return Functions(recorded.graphs, own, numbers, kept)


def _recorded(
    functions: Mapping[str, Any],
    own: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    known: list[torch.Tensor] | None,
) -> tuple[_Recorded, list[torch.Tensor], bool]:
    """Record functions; also the tensors captured, and whether it lasts."""
    values = tuple([(n, type(x)) for n, x in numbers.items()])
    given, unread = traced.given_of(_described(own), values)
    capture = _Capture(len(own), _names_of(functions, unread), known)
    roots: list[tuple[str, Node]] = []
    with capture, trace.capturing(capture.number):
        for role, function in functions.items():
            root, read = trace.record(function, role, given)
            roots.append((role, root))
            unread -= read
    traced.check_read(unread)
    names = tuple([traced.named(capture.name_of(x)) for x in capture.tensors])
    read_from = {**own, **dict(zip(names, capture.tensors, strict=True))}
    traced.given_of(_described(read_from), values)  # checks them
    in_order = [*read_from.items()]
    of_score = [in_order[i] for i in _slots(dict(roots).get("score_mod"))]
    graphs = Graphs(
        tuple(roots),
        tuple([name for name, x in of_score if x.is_floating_point()]),
        any("b" in x.depends for _, x in roots),
    )
    picked = [
        next((i for i, y in enumerate(known or ()) if y is x), None)
        for x in capture.tensors
    ]
    lasts = known is not None and not capture.is_changeable
    return (
        _Recorded(
            graphs,
            names,
            tuple(x for x in picked if x is not None),
            _slots(dict(roots).get("mask_mod")),
        ),
        capture.tensors,
        lasts and None not in picked,
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
        outside += [(n, space[n]) for n in code.co_names if n in space]
        for name, x in outside:
            if isinstance(x, torch.Tensor) and name not in used:
                if found.setdefault(id(x), name) == name:
                    used.add(name)
    return found


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _slots(root: Node | None) -> tuple[int, ...]:
    """The slots of the arrays that a graph reads."""
    if root is None:
        return ()
    return tuple(sorted({x.value[0] for x in nodes.gathers([root])}))


def _readable(name: str, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A tensor from outside of a function, as the call reads it."""
    if x.ndim == 0:
        x = x.reshape(1)
        return x if x.device == q.device else x.to(q.device)
    if x.device != q.device:
        inner = traced.name_of(name)
        raise ValueRangeError(
            f"{inner}, which score_mod or mask_mod reads, is on {x.device},"
            f" expected {q.device} as q is: write {inner} ="
            f" {inner}.to({str(q.device)!r}) before the function is made"
        )
    return x
