"""By what a function's graph is found again: its code, and what that reads."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from cuflash.expressions.remember import Attributes, fingerprint
from cuflash.expressions.watch import Watch


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
                with _LOCK:
                    number = _MODULES.setdefault(value, next(_numbers))
            bases = type(value).__mro__
            bases = bases[: bases.index(torch.nn.Module)]
            spaces = vars(value), value._parameters, value._buffers
            spaces = *spaces, value._modules, *map(vars, bases)
            whole = spaces[1:4] if hasattr(value, "__len__") else ()
            return Attributes((torch.nn.Module, number), spaces, whole)
        if type(value) in _STEADY:
            return value
        return None


# Identities that keep no module alive.
_MODULES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
# Without the GIL, Python 3.13's count() may give a number twice.
_LOCK = threading.Lock()
_STEADY = torch.dtype, torch.device


def _nothing() -> None:
    return None


class Key:
    """A function's fingerprint, the tensors in it, and what it is made of.

    Attributes
    ----------
    of : callable
        Returns the function that has it, if one has.
    value : object
        None: there is none.
    serial : int
        No other key has it.
    tensors : list of Tensor
    """

    __slots__ = ("_metadata", "_watch", "of", "serial", "tensors", "value")

    def __init__(self, function: Any) -> None:
        self.of: Callable[[], Any] = _nothing
        look, self._watch = _Collected(), Watch()
        found = fingerprint(function, look, self._watch)
        # By a number: it is looked up in each call.
        self.value = None if found is None else _number_of(found)
        self.tensors = look.tensors
        with _LOCK:
            self.serial = next(_numbers)
        self._metadata = [(x, x.dtype, x.shape) for x in look.tensors]

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A copy of a function has no key."""
        return type(None), ()

    def holds(self) -> bool:
        """Whether the function would have the same."""
        if self.value is None or not self._watch.holds():
            return False
        for x, dtype, shape in self._metadata:
            if x.dtype is not dtype or x.shape != shape:
                return False
        return True


_NUMBER_OF: dict[Any, int] = {}
_MOST_NUMBERS = 4096
# The attribute of a function that is its key. A key leads to what its function
# closes over, and so may lead to it: a table of keys, even a weak one, would
# keep all.
_KEY = "__cuflash_key__"


def _number_of(found: Any) -> int:
    with _LOCK:
        if len(_NUMBER_OF) >= _MOST_NUMBERS:
            _NUMBER_OF.clear()
        return _NUMBER_OF.setdefault(found, next(_numbers))


def key_of(function: Any) -> Key:
    """A function's key, by one look-up where nothing has changed."""
    if type(function) is not FunctionType:
        return Key(function)
    own = function.__dict__
    found = own.get(_KEY)
    # functools.wraps() copies a function's attributes.
    if found is None or found.of() is not function or not found.holds():
        found = own[_KEY] = Key(function)
        found.of = weakref.ref(function)
    return found
