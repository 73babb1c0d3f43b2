"""What a fingerprint was taken of: it stays the same as long as this does."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

_MISSING = object()


class Watch:
    """Where a function found what it reads, and what was there.

    Attributes
    ----------
    is_possible : bool
        Whether all that it reads can be watched.
    """

    __slots__ = ("_cells", "_functions", "_names", "_whole", "is_possible")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Watch nothing."""
        self.is_possible = True
        self._cells: list[tuple[CellType, Any]] = []
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._whole: list[tuple[Mapping[str, Any], tuple[str, ...]]] = []
        # Weak, so that what stands in a function does not hold it.
        self._functions: list[tuple[weakref.ref[FunctionType], Any, Any]] = []

    def cell(self, cell: CellType, content: Any) -> None:
        """Watch a variable of a closure."""
        self._cells.append((cell, content))

    def name(self, space: Mapping[str, Any], name: str) -> None:
        """Watch a name among globals, or among attributes."""
        self._names.append((space, name, space.get(name, _MISSING)))

    def all_of(self, space: Mapping[str, Any]) -> None:
        """Watch all of some attributes."""
        for name in space:
            self.name(space, name)
        self._whole.append((space, tuple(space)))

    def function(self, function: FunctionType) -> None:
        """Watch what may be assigned to a function."""
        if function.__kwdefaults__:
            self.is_possible = False
        self._functions.append((
            weakref.ref(function), function.__code__, function.__defaults__
        ))  # fmt: skip

    def holds(self) -> bool:
        """Whether all is as it was."""
        if not self.is_possible:
            return False
        for cell, content in self._cells:
            if cell.cell_contents is not content:
                return False
        for space, name, value in self._names:
            if space.get(name, _MISSING) is not value:
                return False
        for space, names in self._whole:
            if tuple(space) != names:
                return False
        for reference, code, defaults in self._functions:
            function = reference()
            if function is None or function.__code__ is not code:
                return False
            if function.__defaults__ is not defaults:
                return False
        return True
