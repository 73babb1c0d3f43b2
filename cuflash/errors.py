"""The errors that cuflash raises, and helpers for their messages.

Every error derives from `CuflashError` and from a built-in exception.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CompileError",
    "CuflashError",
    "DTypeError",
    "ExpressionError",
    "GroupError",
    "KernelFault",
    "ShapeError",
    "UnsupportedError",
    "ValueRangeError",
]


class CuflashError(Exception):
    """The base class of every error that cuflash raises on purpose."""


class ShapeError(CuflashError, ValueError):
    """The rank or a size of an array does not match the other arrays."""


class ValueRangeError(CuflashError, ValueError):
    """An argument has the right type but a value out of range."""


class DTypeError(CuflashError, TypeError):
    """An argument has the wrong type, or an array the wrong dtype."""


class UnsupportedError(CuflashError, NotImplementedError):
    """A valid request that this version or this machine cannot run."""


class ExpressionError(CuflashError, TypeError):
    """A `score_mod` or `mask_mod` cannot be recorded; names its line."""


class CompileError(CuflashError, RuntimeError):
    """A kernel did not compile; the message shows the failing source lines."""


class GroupError(CuflashError, RuntimeError):
    """A rank of a group failed, or did not answer in time."""


class KernelFault(CuflashError, RuntimeError):
    """The emulator caught a kernel in an illegal operation, such as a race.

    Attributes
    ----------
    kernel : str
        The kernel's entry function.
    message : str
        Which block and thread did what, and where.
    """

    def __init__(self, kernel: str, message: str) -> None:
        super().__init__(kernel, message)
        self.kernel, self.message = kernel, message

    def __str__(self) -> str:
        return f"{self.kernel}: {self.message}"


# Helpers for messages ----------------------------------------------------


def type_name(value: Any) -> str:
    """The name of a value's type, with its module unless that is builtins."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def in_words(value: Any) -> str:
    """Describe a wrong value: the value and its type, or only the type."""
    if isinstance(value, (bool, int, float, complex, str)):
        return f"{value!r} of type {type_name(value)}"
    return f"of type {type_name(value)}"
