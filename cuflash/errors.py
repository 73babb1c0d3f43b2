"""The errors that cuflash raises, and words that their messages share.

One root, and built-in parents besides.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CompileError",
    "CuflashError",
    "DTypeError",
    "KernelFault",
    "ShapeError",
    "UnsupportedError",
    "ValueRangeError",
]


class CuflashError(Exception):
    """The root of every error that cuflash raises on purpose."""


class ShapeError(CuflashError, ValueError):
    """An array has a rank or a size that does not fit the others."""


class ValueRangeError(CuflashError, ValueError):
    """An argument of the right type has a value that cannot be used."""


class DTypeError(CuflashError, TypeError):
    """An argument has the wrong type, or an array the wrong dtype."""


class UnsupportedError(CuflashError, NotImplementedError):
    """A meaningful request that this version or this machine cannot run."""


class CompileError(CuflashError, RuntimeError):
    """A kernel did not compile; the message shows the source at the fault."""


class KernelFault(CuflashError, RuntimeError):
    """A kernel that the emulator ran did what no kernel may.

    Attributes
    ----------
    kernel : str
        Its entry.
    message : str
        Which block and thread did what, and where.
    """

    def __init__(self, kernel: str, message: str) -> None:
        super().__init__(kernel, message)
        self.kernel, self.message = kernel, message

    def __str__(self) -> str:
        return f"{self.kernel}: {self.message}"


# Words of messages -------------------------------------------------------


def type_name(value: Any) -> str:
    """The type of a value, with its module if that is not builtins."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def in_words(value: Any) -> str:
    """A wrong value and its type; an array only by its type."""
    if isinstance(value, (bool, int, float, complex, str)):
        return f"{value!r} of type {type_name(value)}"
    return f"of type {type_name(value)}"
