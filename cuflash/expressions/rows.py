"""Rows: a few traced values along an axis, as PyTorch's programs have them.

``(chosen[b, h, q_idx // 64] == (kv_idx // 64).unsqueeze(-1)).any(-1)`` is a
value of a pair, made of a row of values: each is recorded on its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from cuflash.expressions.trace import (
    METHODS,
    OPERATORS,
    Several,
    Symbol,
    refuse,
)


class Row(Several):
    """Traced values in a row; one of length 1 broadcasts.

    Attributes
    ----------
    items : tuple of Symbol
    """

    __slots__ = ("items",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = tuple(items)

    @property
    def shape(self) -> tuple[int]:
        return (len(self.items),)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            refuse("a row of traced values is read by an index", "write a[0]")
        return self.items[key]

    def __bool__(self) -> bool:
        return bool(self.items[0])  # refuses

    def __getattr__(self, name: str) -> Any:
        if name in REDUCTIONS or name in METHODS:
            return functools.partial(_method, name, self)
        raise AttributeError(
            f"a row of traced values has no attribute {name!r}", name=name
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, named = function.__name__, kwargs or {}
        if not any(isinstance(x, Several) for x in args):
            refuse(
                f"torch.{name} of arrays",
                "read an element of each: table[q_idx]",
            )
        if name in REDUCTIONS:
            return _method(name, as_row(args[0]), *args[1:], **named)
        if name in ("dot", "inner", "vdot"):
            return functools.reduce(operator.add, as_row(args[0]) * args[1])
        return each(
            lambda *x: Symbol.__torch_function__(function, (), x, kwargs),
            *args,
        )


def _unsqueeze(value: Symbol, dim: int) -> Row:
    """PyTorch's: a row of a value alone."""
    if dim not in (-1, 0):
        refuse("x.unsqueeze but along the last axis", "write x.unsqueeze(-1)")
    return Row((value,))


Symbol.unsqueeze = _unsqueeze  # type: ignore[attr-defined]

# Elements of an array that are read as a row: all of them, for each pair.
_MOST = 64


def as_row(value: Any) -> Row:
    """What holds several values as a row, if it has one axis and is short."""
    if isinstance(value, Row):
        return value
    if len(value.shape) != 1 or value.shape[0] > _MOST:
        value._used()
    return Row(value)


def each(function: Callable[..., Any], *operands: Any) -> Row:
    """A function of each value of rows; other operands are for all."""
    rows = [as_row(x) if isinstance(x, Several) else x for x in operands]
    lengths = {len(x) for x in rows if isinstance(x, Row)} - {1}
    if len(lengths) > 1:
        refuse(
            f"rows of {' and '.join(map(str, sorted(lengths)))} traced values",
            "make them of one length",
        )
    (length,) = lengths or {1}
    return Row(
        function(*(
            x.items[i if len(x) > 1 else 0] if isinstance(x, Row) else x
            for x in rows
        ))
        for i in range(length)
    )  # fmt: skip


REDUCTIONS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "any": lambda x: functools.reduce(np.logical_or, x, False),
    "all": lambda x: functools.reduce(np.logical_and, x, True),
    "sum": lambda x: functools.reduce(operator.add, x, 0),
    "amax": lambda x: functools.reduce(np.maximum, x),
    "amin": lambda x: functools.reduce(np.minimum, x),
}


def _method(name: str, row: Row, *args: Any, **named: Any) -> Any:
    """A function called as a method of a row."""
    if name not in REDUCTIONS:
        return each(lambda x, *y: getattr(x, name)(*y, **named), row, *args)
    dim = named.pop("dim", args[0] if args else -1)
    if dim not in (-1, 0, None) or len(args) > 1 or any(named.values()):
        refuse(
            f"x.{name} but along the last axis, which goes",
            f"write x.{name}(dim=-1)",
        )
    return REDUCTIONS[name](row.items)


def _with_operator(short: str) -> None:
    """Give rows one of Python's operators on two values."""
    names = {"and": "and_", "or": "or_"}
    function = getattr(operator, names.get(short, short))

    def forward(self: Any, other: Any) -> Row:
        return each(function, self, other)

    def reflected(self: Any, other: Any) -> Row:
        return each(function, other, self)

    setattr(Several, f"__{short}__", forward)
    setattr(Several, f"__r{short}__", reflected)


def _with_operator_of_one(short: str) -> None:
    function = getattr(operator, short)
    setattr(Several, f"__{short}__", lambda x: each(function, x))


for _short in OPERATORS:
    _with_operator(_short)
for _short in ("neg", "abs", "invert"):
    _with_operator_of_one(_short)
