"""A user's score_mod and mask_mod on tensors: their graphs, what they read.

A function is recorded once; later calls find its graph by the function's key,
and collect the tensors again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cuflash.errors import ValueRangeError
from cuflash.expressions.serial import dumps, loads
from cuflash.request import traced
from cuflash.request.kept import Kept

from .checks import check_tensors
from .function_keys import Key, key_of
from .placed import is_placeable, placed
from .recording import Graphs, moved_of, reads_batch, recorded
from .tracing import PLAIN, TRANSFORMED

_ROLES = "score_mod", "mask_mod"


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

    @classmethod
    def of_program(
        cls, read: Sequence[torch.Tensor], values: Sequence[Any], graphs: str
    ) -> Functions:
        """Those of an operator's arguments: see `as_program`."""
        roots = loads(graphs)
        arrays = {named_at(i): x for i, x in enumerate(read)}
        names = [f"number_{i}" for i in range(len(values))]
        found = Graphs(roots, moved_of(roots, arrays), reads_batch(roots))
        return cls(found, arrays, dict(zip(names, values, strict=True)))

    def as_options(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call on these arrays in place of the tensors."""
        values = self.numbers.values()
        read = traced.of_slots(arrays, self.numbers, [*values])
        return {**dict(self.graphs.roots), **read}

    def readable_arrays(self) -> dict[str, torch.Tensor]:
        """The arrays, as kernels read them."""
        return {name: x.resolve_neg() for name, x in self.arrays.items()}

    def in_key(self) -> dict[str, Any]:
        """What a call is found by: what differs from call to call is no part.

        The graphs, and numbers of the same types.
        """
        found = dict(self.graphs.roots)
        if not self.numbers:
            return found
        kinds = {n: type(x)() for n, x in self.numbers.items()}
        return {**found, "mod_arrays": traced.BySlot(kinds)}

    def as_program(self) -> tuple[Any, ...]:
        """What an operator takes of them."""
        values = [*self.numbers.values()]
        return [*self.arrays.values()], values, dumps(self.graphs.roots)


def named_at(place: int) -> str:
    """What an array of `Functions.of_program` is called."""
    return traced.named(f"array_{place}")


class Snapshot:
    """What calls with one block mask share, until what it reads changes.

    Parameters
    ----------
    mask_mod : callable
        The whole mask.
    """

    def __init__(self, mask_mod: Any) -> None:
        self.mask_mod = mask_mod
        self._read: list[tuple[torch.Tensor, Any]] = []
        self._numbers: tuple[Any, ...] = ()
        self._kept = Kept()

    def kept_for(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any] = ()
    ) -> Kept | None:
        """What to share for a mask that reads these; None: nothing."""
        before = self._read
        now: tuple[Any, ...] = ()
        if numbers:
            now = (*map(type, numbers), *traced.bits(tuple(numbers)))
        if len(tensors) == len(before) and now == self._numbers:
            for x, (y, version) in zip(tensors, before, strict=True):
                if x is not y or version_of(x) != version:
                    break
            else:
                return self._kept
        read = [(x, version_of(x)) for x in tensors]
        if any(version is None for _, version in read):
            return None
        self._read, self._numbers, self._kept = read, now, Kept()
        return self._kept


def version_of(x: torch.Tensor) -> tuple[int, int] | None:
    """What changes with a tensor's content; None: that is not known."""
    try:
        return x._version, x.data_ptr()
    except RuntimeError:  # one of inference mode, or without storage
        return None


class _Known(NamedTuple):
    """What is remembered of functions.

    Attributes
    ----------
    graphs, names, of_mask, numbers_of_mask
        As in `Recording`.
    picked : tuple of int
        Which of the tensors that their keys list are read.
    lasts : bool
        False: they are recorded in each call, and nothing is picked.
    """

    graphs: Graphs
    names: tuple[str, ...]
    of_mask: tuple[int, ...]
    numbers_of_mask: tuple[int, ...]
    picked: tuple[int, ...] = ()
    lasts: bool = False


# By keys, which are those of the same functions as before; and by what keys
# say, which equal functions share.
_OF_KEYS: dict[Any, _Known] = {}
_OF_CONTENT: dict[Any, _Known] = {}
_MOST_KNOWN = 4096


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
    functions: dict[str, Any] = {}
    for role in _ROLES:
        if role in options:
            functions[role] = options.pop(role)
    shared = getattr(functions.get("mask_mod"), "snapshot", None)
    if isinstance(shared, Snapshot):
        functions["mask_mod"] = shared.mask_mod
    else:
        shared = None
    numbers = options.pop("mod_arrays", {})
    own: dict[str, torch.Tensor] = {}
    if arrays:
        own = {x: arrays.pop(x) for x in [*arrays] if traced.is_named(x)}
    if own or type(q) not in PLAIN:
        check_tensors(own if q is None else {"q": q, **own})
    if not functions:
        if own or numbers:
            traced.recorded({"mod_arrays": numbers, **own})  # refuses them
        return None
    keys = [*map(key_of, functions.values())]
    kinds: tuple[Any, ...] = ()
    if own or numbers:
        kinds = (
            *[(n, x.dtype, x.ndim) for n, x in own.items()],
            *[(n, type(x)) for n, x in numbers.items()],
        )
    key = (*functions, *map(_serial_of, keys), kinds)
    found = _OF_KEYS.get(key)
    captured: Iterable[torch.Tensor]
    if found is None:
        found, captured = _found(functions, keys, own, numbers, kinds)
        if found.lasts:
            _put(_OF_KEYS, key, found)
    elif len(keys) == 1:
        captured = map(keys[0].tensors.__getitem__, found.picked)
    else:
        tensors = keys[0].tensors + keys[1].tensors
        captured = map(tensors.__getitem__, found.picked)
    for name, x in zip(found.names, captured, strict=True):
        own[name] = x
    kept = None
    if shared is not None and found.lasts:
        kept = _kept_of(shared, found, own, numbers)
    if q is not None:
        for name in found.names:
            own[name] = readable(name, own[name], q)
    for name, x in own.items():
        if not x.ndim:
            own[name] = x.reshape(1)
    return Functions(found.graphs, own, numbers, kept)


_serial_of = operator.attrgetter("serial")


def _found(
    functions: dict[str, Any],
    keys: list[Key],
    own: dict[str, torch.Tensor],
    numbers: dict[str, Any],
    kinds: tuple[Any, ...],
) -> tuple[_Known, Sequence[torch.Tensor]]:
    """What equal functions have left, or what recording finds; tensors."""
    tensors = [x for key in keys for x in key.tensors]
    ids = [*map(id, tensors)]
    is_known = all(x.value is not None for x in keys)
    content = (
        *[(role, x.value) for role, x in zip(functions, keys, strict=True)],
        *map(ids.index, ids),  # which are one
        *kinds,
    )
    found = _OF_CONTENT.get(content) if is_known else None
    if found is None:
        new = recorded(functions, own, numbers, tensors if is_known else None)
        graphs, names, captured, of_mask, numbers_of_mask = new[:5]
        found = _Known(graphs, names, of_mask, numbers_of_mask)
        if not (is_known and new.lasts and {*map(id, captured)} <= {*ids}):
            return found, captured
        picked = tuple([ids.index(id(x)) for x in captured])
        found = found._replace(picked=picked, lasts=True)
        _put(_OF_CONTENT, content, found)
    return found, [tensors[i] for i in found.picked]


def _put(table: dict[Any, _Known], key: Any, found: _Known) -> None:
    if len(table) >= _MOST_KNOWN:
        table.clear()
    table[key] = found


def _kept_of(
    shared: Snapshot,
    found: _Known,
    own: dict[str, torch.Tensor],
    numbers: dict[str, Any],
) -> Kept | None:
    """What calls with this block mask share."""
    tensors: Sequence[torch.Tensor] = ()
    values: Sequence[Any] = ()
    if found.of_mask:
        read = [*own.values()]
        tensors = [read[i] for i in found.of_mask]
    if found.numbers_of_mask:
        given = [*numbers.values()]
        values = [given[i] for i in found.numbers_of_mask]
    return shared.kept_for(tensors, values)


def readable(name: str, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A tensor from outside of a function, as the call reads it."""
    if x.device != q.device and is_placeable(x):
        x = placed(x, q.device)
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


# Where a compiler would look into it: what graphs made inside torch.func
# return may have lost their gradients.
taken_in_eager_mode = torch.compiler.disable(taken, reason=TRANSFORMED)
