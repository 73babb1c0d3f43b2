"""What a recorded graph depends on besides the arrays: a key for it.

A function's graph follows from its code, closure, defaults, and from those
globals and attributes that its code names. Numbers among them count by value,
what else a function can only call by identity. Where neither is sure, there
is no key, and the function is recorded in every call.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuflash.expressions.watch import Watch

_PLAIN = (int, bool, str, bytes, complex, type(None), type(...))
_LIBRARIES = {
    "numpy", "torch", "cupy", "jax", "math", "operator", "functools", "typing",
}  # fmt: skip
# What does not change while its name stands for it.
_STEADY = (
    BuiltinFunctionType, MethodType, np.ufunc, np.dtype, type(np.where)
)  # fmt: skip
# What finds attributes by strings, which then count as names.
BY_STRING = frozenset(("getattr", "hasattr", "attrgetter", "__dict__", "vars"))
# Shows that an object has content besides attributes, or makes them up: a
# container, an iterator, an array of any library.
CHANGING = "__len__", "__getitem__", "__iter__", "shape", "__getattr__"
_LONGEST = 64  # elements that are compared one by one
_DEEPEST = 8  # of what leads to something


class _ChangeableError(Exception):
    """Something may change without a trace in the key."""


class Same:
    """A value that only itself equals; kept alive by the key it is in."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _SameObject:
    """A value that only itself equals, as long as it lives."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any) -> None:
        self._hash, self._value = id(value), weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self._value()
        return (
            isinstance(other, _SameObject)
            and value is not None
            and value is other._value()
        )

    def __hash__(self) -> int:
        return self._hash


def _same(value: Any) -> Same | _SameObject:
    """A value by its identity; kept alive only if it has no weak reference."""
    try:
        return _SameObject(value)
    except TypeError:
        return Same(value)


class Look(Protocol):
    """Tells what is compared of values that another library knows."""

    def begin(self) -> None:
        """A function is looked at, from its beginning."""

    def of(self, value: Any) -> Any:
        """What is compared; `Attributes`; None: not known."""


class Attributes(NamedTuple):
    """What a library's object consists of.

    Attributes
    ----------
    identity : object
        Stands for the object.
    spaces : tuple of mapping
        In which its attributes are found, in this order.
    whole : tuple of mapping
        All of whose content counts, under any name.
    """

    identity: Any
    spaces: tuple[Mapping[str, Any], ...]
    whole: tuple[Mapping[str, Any], ...] = ()


def fingerprint(
    function: Any, look: Look | None = None, watch: Watch | None = None
) -> Any:
    """A key for a function's graph; None if there is none.

    Parameters
    ----------
    function : callable
    look : Look, optional
    watch : Watch, optional
        Gets what the key was made of.
    """
    watch = watch or Watch()
    code = getattr(function, "__code__", None)
    names = _REACHED.get(code, frozenset())
    try:
        while True:
            if look is not None:
                look.begin()
            watch.begin()
            content = _Content(names, look, watch)
            found = content.of(function, 0)
            if content.names <= names:
                return found
            names = _REACHED[code] = frozenset(content.names)
    except _ChangeableError:
        return None


# The names in all functions that a code has led to: attributes of an object
# may be read by any of them.
_REACHED: dict[Any, frozenset[str]] = {}


_NAMES: dict[CodeType, tuple[tuple[str, ...], frozenset[str]]] = {}


def names_of(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that a code reads, and all names, attributes among them."""
    found = _NAMES.get(code)
    if found is None:
        read = [
            x.argval
            for x in dis.get_instructions(code)
            if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        ]
        names = {*code.co_names}
        if names & BY_STRING:
            names |= {x for x in code.co_consts if type(x) is str}
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                more = names_of(inner)
                read += more[0]
                names |= more[1]
        found = tuple(dict.fromkeys(read)), frozenset(names)
        _NAMES[code] = found
    return found


class _Content:
    """What is compared of values; a value within itself is not again."""

    def __init__(
        self, names: frozenset[str], look: Look | None, watch: Watch
    ) -> None:
        self.names = set(names)
        self._look, self._watch = look, watch
        self._within: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:
        """A value by what codes with these names can read of it."""
        kind = type(value)
        if kind in _PLAIN:
            if kind is str and self.names & BY_STRING:
                self.names.add(value)
            return kind, value
        if kind is float:
            return kind, repr(value)  # tells -0.0 from 0.0, knows a NaN
        if kind is ModuleType and is_library(value):
            return value
        if id(value) in self._within:
            return _same(value)
        if depth > _DEEPEST:
            raise _ChangeableError
        self._within.add(id(value))
        try:
            return self._of(kind, value, depth + 1)
        finally:
            self._within.discard(id(value))

    def _of(self, kind: type, value: Any, depth: int) -> Any:
        if kind is FunctionType:
            if value.__closure__ is None and is_library(value):
                return Same(value)
            return self._of_function(value, depth)
        if self._look is not None:
            found = self._look.of(value)
            if isinstance(found, Attributes):
                return self._of_attributes(found, depth)
            if found is not None:
                return found
        if kind is not tuple:
            self._watch.is_possible &= kind in _STEADY or (
                kind is type and is_of_library(value)
            )
        if kind in (tuple, list):
            return kind, self._several(value, depth)
        if kind is dict:
            return (
                kind, self._several(value, depth),
                self._several(value.values(), depth),
            )  # fmt: skip
        if kind is MethodType:
            function, owner = value.__func__, value.__self__
            return kind, self.of(function, depth), self.of(owner, depth)
        if kind is functools.partial:
            named = value.keywords
            return (
                kind, self.of(value.func, depth),
                self._several(value.args, depth), tuple(named),
                self._several(named.values(), depth),
            )  # fmt: skip
        if isinstance(value, np.generic):
            return kind, value.dtype.str, value.tobytes()
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        return self._of_object(kind, value, depth)

    def _several(self, values: Any, depth: int) -> Any:
        if len(values) > _LONGEST:
            raise _ChangeableError
        return tuple([self.of(x, depth) for x in values])

    def _of_attributes(self, found: Attributes, depth: int) -> Any:
        """A library's object, by the attributes that codes name."""
        own: dict[str, Any] = {}
        for space in found.spaces[::-1]:
            own |= {x: space[x] for x in self.names if x in space}
            for name in self.names:
                self._watch.name(space, name)
        listed = []
        for space in found.whole:
            self._watch.all_of(space)
            listed += [tuple(space), self._several(space.values(), depth)]
        return found.identity, self._named(own, depth), *listed

    def _of_function(self, function: Any, depth: int) -> Any:
        code, space = function.__code__, function.__globals__
        read, names = names_of(code)
        self.names |= names
        self._watch.function(function)
        parts: list[Any] = [code]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned so far
                self._watch.is_possible = False
                parts.append(Same(cell))
                continue
            self._watch.cell(cell, content)
            parts.append(self.of(content, depth))
        parts += [self.of(x, depth) for x in function.__defaults__ or ()]
        named = function.__kwdefaults__ or {}
        parts += [(x, self.of(y, depth)) for x, y in named.items()]
        own = function.__dict__
        parts.append(self._named(own, depth))
        for name in own:
            if name in self.names:
                self._watch.name(own, name)
        for name in read:
            self._watch.name(space, name)
        parts += [(x, self.of(space[x], depth)) for x in read if x in space]
        return tuple(parts)

    @staticmethod
    def _of_array(value: Any) -> Any:
        if value.size > _LONGEST or value.dtype.hasobject:
            raise _ChangeableError
        return value.dtype.str, value.shape, value.tobytes()

    def _of_object(self, kind: type, value: Any, depth: int) -> Any:
        """By identity, and by the attributes that codes name."""
        if kind in (BuiltinFunctionType, np.ufunc, np.dtype, type(np.where)):
            return Same(value)
        if kind in (property, classmethod, staticmethod):
            inner = "fget" if kind is property else "__func__"
            return kind, self.of(getattr(value, inner), depth)
        if isinstance(value, type):
            if is_of_library(value):
                return Same(value)
            own = all_of(value)
        elif kind is ModuleType:
            own = dict(vars(value))  # another thread may import into it
        else:
            own = self._of_instance(kind, value)
        items = self._several(value, depth) if isinstance(value, tuple) else ()
        return _same(value), self._named(own, depth), items

    def _named(self, own: dict[str, Any], depth: int) -> Any:
        """The attributes that codes name."""
        return tuple([
            (name, self.of(x, depth)) for name, x in own.items()
            if name in self.names or name == "__call__"
        ])  # fmt: skip

    @staticmethod
    def _of_instance(kind: type, value: Any) -> dict[str, Any]:
        """Attributes of an object and of its class."""
        own = all_of(kind)
        if not isinstance(value, (tuple, str, bytes)):
            if kind is ContextVar or not own.keys().isdisjoint(CHANGING):
                raise _ChangeableError
        for name, slot in own.items():
            if isinstance(slot, MemberDescriptorType):
                own[name] = getattr(value, name, None)
        return own | getattr(value, "__dict__", {})


def is_library(value: Any) -> bool:
    """Whether a module, a function, a class is one of a library."""
    name = value.__name__ if isinstance(value, ModuleType) else (
        value.__module__
    )  # fmt: skip
    return str(name).partition(".")[0] in _LIBRARIES


def is_of_library(kind: type) -> bool:
    """Whether nobody assigns to a class's attributes."""
    return is_library(kind) or kind.__module__ == "builtins"


def all_of(kind: type) -> dict[str, Any]:
    """What a class and its bases define, `object` aside."""
    found: dict[str, Any] = {}
    for base in kind.__mro__[:-1][::-1]:
        found |= vars(base)
    return found
