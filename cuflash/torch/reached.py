"""What functions read from outside, and by which paths compiled code finds it.

All of it, or nothing: compiled code compares with what was there, so that what
no path leads to could change without being seen.
"""

from __future__ import annotations

import functools
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

from cuflash.expressions import remember

Path = tuple[tuple[str, Any], ...]

_MOST_STEPS = 12
_MOST_ITEMS = 64
_CONSTANTS = bool, int, float, str, type(None), torch.dtype
# What nobody changes while its name stands for it.
_STEADY = (
    BuiltinFunctionType, np.ufunc, np.dtype, type(np.where), torch.device,
    type(...),
)  # fmt: skip


class UnguardedError(Exception):
    """Something is read to which no path leads."""


class Reached:
    """What a function may read.

    Attributes
    ----------
    tensors : list of (path, Tensor)
    constants : list of (path, value)
        Numbers, strings, dtypes, and the codes of functions.
    fixed : list of path
        To functions and classes of libraries: to reach one guards it.
    names : set of str
        Those in all codes, which may be attributes of what they read.

    Raises
    ------
    UnguardedError
    """

    def __init__(self, function: Any) -> None:
        self.names: set[str] = set()
        known: set[str] | None = None
        while known != self.names:
            known = {*self.names}
            self.tensors: list[tuple[Path, torch.Tensor]] = []
            self.constants: list[tuple[Path, Any]] = []
            self.fixed: list[Path] = []
            self._seen: set[int] = set()
            self._visit((), function)

    def _visit(self, path: Path | None, value: Any) -> None:
        """See what a path leads to; None: no path does."""
        if type(value) in _STEADY or _is_of_library(value):
            if path and path[-1][0] != "global":
                self.fixed.append(path)
            return
        if path is None and not isinstance(value, FunctionType):
            raise UnguardedError(f"a {type(value).__name__} of a property")
        path = path or ()
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
        elif type(value) in _CONSTANTS:
            if type(value) is str and self.names & remember.BY_STRING:
                self.names.add(value)
            self.constants.append((path, value))
        elif len(path) > _MOST_STEPS:
            raise UnguardedError("what many steps lead to")
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._visit_object(path, value)

    def _visit_object(self, path: Path, value: Any) -> None:
        kind = type(value)
        if kind is FunctionType:
            self.constants.append(
                ((*path, ("attribute", "__code__")), value.__code__)
            )
            self._visit_function(path, value)
        elif kind is MethodType:
            self._attributes(path, value, ("__func__", "__self__"))
        elif kind is functools.partial:
            self._attributes(path, value, ("func", "args", "keywords"))
        elif kind is dict:
            if not all(type(x) in (str, int) for x in value):
                raise UnguardedError("a dict with keys of any kind")
            self._items(path, value.items())
        elif kind in (list, tuple):
            self._items(path, [*enumerate(value)])
        elif kind is ModuleType:
            own = [x for x in self.names if x in vars(value)]
            self._attributes(path, value, own)
        else:
            self._visit_instance(path, value)

    def _items(self, path: Path, items: Any) -> None:
        if not 0 < len(items) <= _MOST_ITEMS:
            raise UnguardedError(
                f"a container of {len(items)} items, expected 1 to"
                f" {_MOST_ITEMS}"
            )
        for step, x in items:
            self._visit((*path, ("item", step)), x)

    def _attributes(self, path: Path, value: Any, names: Any) -> None:
        for name in names:
            inner = getattr(value, name)
            if name in ("args", "keywords") and not inner:
                continue
            self._visit((*path, ("attribute", name)), inner)

    def _visit_function(self, path: Path | None, function: Any) -> None:
        read, names = remember.names_of(function.__code__)
        self.names |= names
        space = function.__globals__

        def visit(steps: Path, value: Any) -> None:
            self._visit(None if path is None else (*path, *steps), value)

        for i, cell in enumerate(function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError as error:  # not assigned so far
                raise UnguardedError("a variable without a value") from error
            visit((("cell", i),), content)
        for i, x in enumerate(function.__defaults__ or ()):
            visit((("attribute", "__defaults__"), ("item", i)), x)
        for name, x in (function.__kwdefaults__ or {}).items():
            visit((("attribute", "__kwdefaults__"), ("item", name)), x)
        for name in read:
            if name in space:
                visit((("global", name),), space[name])
        if self.names & {*function.__dict__}:
            raise UnguardedError("an attribute of a function")

    def _visit_instance(self, path: Path, value: Any) -> None:
        kind = type(value)
        bases = remember.all_of(kind)
        own = dict(getattr(value, "__dict__", {}))
        if isinstance(value, torch.nn.Module):
            if hasattr(value, "__len__"):
                raise UnguardedError(f"a {kind.__name__}")
            bases = {}
            last = kind.__mro__.index(torch.nn.Module)
            for base in kind.__mro__[:last][::-1]:
                bases |= vars(base)
            own |= value._parameters | value._buffers | value._modules
        elif isinstance(value, type) or not (
            bases.keys().isdisjoint(remember.CHANGING)
            and kind.__flags__ & 1 << 9  # made by a class statement
        ):
            raise UnguardedError(f"a {kind.__name__}")
        for name in sorted({*self.names, "__call__"}):
            step = (*path, ("attribute", name))
            if name in own:
                self._visit(step, own[name])
            elif name in bases:
                self._visit_of_class(step, value, bases[name])

    def _visit_of_class(self, path: Path, owner: Any, value: Any) -> None:
        """What a class has under a name that an instance has not."""
        if isinstance(value, FunctionType):
            self._visit((*path, ("attribute", "__func__")), value)
        elif isinstance(value, property):
            self._visit_function(None, value.fget)
        elif isinstance(value, MemberDescriptorType):
            self._visit(path, getattr(owner, path[-1][1], None))
        elif isinstance(value, (int, float, str, torch.Tensor)):
            self._visit(path, value)
        elif not isinstance(value, CodeType):
            raise UnguardedError(f"a {type(value).__name__} of a class")


def _is_of_library(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return remember.is_library(value)
    if isinstance(value, FunctionType):
        return value.__closure__ is None and remember.is_library(value)
    return isinstance(value, type) and remember.is_of_library(value)
