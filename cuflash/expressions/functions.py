"""The operations that a user's function may use: one row for each.

A row says what NumPy computes, what NumPy's ufuncs call it, what kind its
result has, and its partial derivatives. The kernels' functions of the same
names stand in kernels/score/expression_functions.cuh, for numbers and for
intervals of them (intervals.cuh).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cuflash.expressions import error_function, nodes
from cuflash.expressions.nodes import Kind, Node, constant

Partials = Callable[[Node, tuple[Node, ...]], tuple[Node | None, ...]]


@dataclass(frozen=True)
class Function:
    """An operation.

    Attributes
    ----------
    name : str
        As kernels/score/expression_functions.cuh calls it.
    evaluate : callable
        Of NumPy arrays, or of Python's numbers when constants are folded.
    result : str
        The kind of the result: ``"same"``, the widest of the operands', which
        are converted to it; ``"real"``, and so are the operands; ``"bool"``
        (operands of kinds as they are); ``"int"`` (from a real).
    ufuncs : tuple of str
        NumPy's and PyTorch's names of it, besides `name`.
    partials : callable or None
        (result, operands) to the derivative by each operand, None for 0;
        without it all are 0.
    least : str
        The smallest kind that an operand is converted to.
    """

    name: str
    evaluate: Callable[..., Any]
    result: Literal["same", "real", "bool", "int"]
    ufuncs: tuple[str, ...] = ()
    partials: Partials | None = None
    least: Kind = "bool"

    @property
    def operands(self) -> int:
        """How many it takes."""
        return _OPERANDS.get(self.name, 2)


# ---- What differs between Python, NumPy and C, written out ----


def floor_divide(a: Any, b: Any) -> Any:
    """Rounds down, as Python; an int divided by 0 is 0."""
    return _of_divisor(np.floor_divide, a, b)


def remainder(a: Any, b: Any) -> Any:
    """Has the divisor's sign, as in Python; that of an int by 0 is 0."""
    return _of_divisor(np.remainder, a, b)


def _of_divisor(function: Any, a: Any, b: Any) -> Any:
    a, b = np.asarray(a), np.asarray(b)
    if np.result_type(a, b).kind == "f":
        with np.errstate(all="ignore"):
            return function(a, b)
    safe = np.where(b == 0, 1, b)
    with np.errstate(all="ignore"):  # the least int by -1 overflows
        return np.where(b == 0, 0, function(a, safe))


def _shifted(function: Any, a: Any, b: Any) -> Any:
    """A shift by less than 0 or more than 62 bits is one by 0 or 62."""
    return function(np.asarray(a, np.int64), np.clip(b, 0, 62))


def _to_int(x: Any) -> Any:
    """Truncates; a real that no int64 holds is 0."""
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    holds = np.abs(x) < 2.0**63  # False for NaN
    return np.where(holds, x, 0).astype(np.int64)


def _quiet(function: Any) -> Callable[..., Any]:
    def evaluate(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return evaluate


# ---- Partial derivatives ----


def _of_product(_: Node, args: tuple[Node, ...]) -> tuple[Node, ...]:
    a, b = args
    return b, a


def _of_quotient(y: Node, args: tuple[Node, ...]) -> tuple[Node, ...]:
    inverse = apply("divide", constant(1.0), args[1])
    return inverse, apply("negative", apply("multiply", y, inverse))


def _of_remainder(_: Node, args: tuple[Node, ...]) -> tuple[Node, ...]:
    quotient = apply("floor", apply("divide", *args))
    return constant(1.0), apply("negative", quotient)


def _of_power(y: Node, args: tuple[Node, ...]) -> tuple[Node, Node | None]:
    x, p = args
    below = apply("power", x, apply("subtract", p, constant(1.0)))
    by_base = apply("product_if", p, below)  # of x^0: 0, also at 0
    if p.is_constant:
        return by_base, None
    return by_base, apply("product_if", y, apply("log", x))


def _of_choice(_: Node, args: tuple[Node, ...]) -> tuple[Node | None, ...]:
    one, none = constant(1.0), constant(0.0)
    taken = args[0]
    return (
        None, apply("where", taken, one, none),
        apply("where", taken, none, one),
    )  # fmt: skip


def _of_extreme(compare: str) -> Partials:
    """Of equal operands, the first one's branch is taken."""

    def partials(_: Node, args: tuple[Node, ...]) -> tuple[Node | None, ...]:
        return _of_choice(_, (apply(compare, *args), *args))[1:]

    return partials


def _by(function: Callable[[Node, Node], Node]) -> Partials:
    """Of one operand: (result, operand) to the derivative."""
    return lambda y, args: (function(y, args[0]),)


def _of_error(factor: float) -> Partials:
    """factor exp(-x^2), 2 / sqrt(pi) of erf."""
    return _by(lambda y, x: apply(
        "multiply", constant(factor),
        apply("exp", apply("negative", apply("multiply", x, x))),
    ))  # fmt: skip


_LN2 = float(np.log(2.0))
_LN10 = float(np.log(10.0))

_REALS = (
    Function("exp", _quiet(np.exp), "real", (), _by(lambda y, x: y)),
    Function(
        "exp2", _quiet(np.exp2), "real", (),
        _by(lambda y, x: apply("multiply", constant(_LN2), y)),
    ),
    Function(
        "expm1", _quiet(np.expm1), "real", (),
        _by(lambda y, x: apply("add", y, constant(1.0))),
    ),
    Function(
        "log", _quiet(np.log), "real", (),
        _by(lambda y, x: apply("divide", constant(1.0), x)),
    ),
    Function(
        "log2", _quiet(np.log2), "real", (),
        _by(lambda y, x: apply("divide", constant(1 / _LN2), x)),
    ),
    Function(
        "log10", _quiet(np.log10), "real", (),
        _by(lambda y, x: apply("divide", constant(1 / _LN10), x)),
    ),
    Function(
        "log1p", _quiet(np.log1p), "real", (),
        _by(lambda y, x: apply(
            "divide", constant(1.0), apply("add", x, constant(1.0)))),
    ),
    Function(
        "tanh", np.tanh, "real", (),
        _by(lambda y, x: apply(
            "subtract", constant(1.0), apply("multiply", y, y))),
    ),
    Function(
        "arctan", np.arctan, "real", ("atan",),
        _by(lambda y, x: apply(
            "divide", constant(1.0),
            apply("add", apply("multiply", x, x), constant(1.0)))),
    ),
    Function(
        "erf", error_function.erf, "real", ("special_erf",),
        _of_error(2 / math.sqrt(math.pi)),
    ),
    Function(
        "erfc", error_function.erfc, "real", ("special_erfc",),
        _of_error(-2 / math.sqrt(math.pi)),
    ),
    Function(
        "sqrt", _quiet(np.sqrt), "real", (),
        _by(lambda y, x: apply("divide", constant(0.5), y)),
    ),
    Function(
        "sin", _quiet(np.sin), "real", (),
        _by(lambda y, x: apply("cos", x)),
    ),
    Function(
        "cos", _quiet(np.cos), "real", (),
        _by(lambda y, x: apply("negative", apply("sin", x))),
    ),
    Function("floor", np.floor, "real"),
    Function("ceil", np.ceil, "real"),
    Function("trunc", np.trunc, "real", ("fix",)),
    Function("rint", np.rint, "real", ("round",)),
)  # fmt: skip

_ARITHMETIC = (
    Function(
        "add", _quiet(np.add), "same", (),
        lambda y, args: (constant(1.0), constant(1.0)), "int",
    ),
    Function(
        "subtract", _quiet(np.subtract), "same", ("sub",),
        lambda y, args: (constant(1.0), constant(-1.0)), "int",
    ),
    Function(
        "multiply", _quiet(np.multiply), "same", ("mul",), _of_product, "int"
    ),
    Function(
        "divide", _quiet(np.divide), "real", ("true_divide", "div"),
        _of_quotient,
    ),
    Function("floor_divide", floor_divide, "same", (), None, "int"),
    Function("remainder", remainder, "same", ("mod",), _of_remainder, "int"),
    Function(
        "power", _quiet(np.power), "real", ("pow", "float_power"), _of_power
    ),
    Function(
        "negative", _quiet(np.negative), "same", ("neg",),
        lambda y, args: (constant(-1.0),), "int",
    ),
    Function(
        "absolute", _quiet(np.abs), "same", ("abs", "fabs"),
        _by(lambda y, x: apply("sign", x)), "int",
    ),
    Function("sign", np.sign, "same", ("sgn",), None, "int"),
    Function(
        "minimum", np.minimum, "same", (), _of_extreme("less_equal"), "int"
    ),
    Function(
        "maximum", np.maximum, "same", (), _of_extreme("greater_equal"), "int"
    ),
)  # fmt: skip

_TRUTHS = (
    Function("less", np.less, "bool", ("lt",)),
    Function("less_equal", np.less_equal, "bool", ("le",)),
    Function("greater", np.greater, "bool", ("gt",)),
    Function("greater_equal", np.greater_equal, "bool", ("ge",)),
    Function("equal", np.equal, "bool", ("eq",)),
    Function("not_equal", np.not_equal, "bool", ("ne",)),
    Function("isnan", np.isnan, "bool", (), None, "real"),
    Function("isinf", np.isinf, "bool", (), None, "real"),
)

# Of bools as of ints: bitwise.
_BITS = (
    Function("bitwise_and", np.bitwise_and, "same"),
    Function("bitwise_or", np.bitwise_or, "same"),
    Function("bitwise_xor", np.bitwise_xor, "same"),
    Function("invert", np.invert, "same", ("bitwise_not",)),
    Function(
        "left_shift", lambda a, b: _shifted(np.left_shift, a, b), "same",
        ("bitwise_left_shift",), None, "int",
    ),
    Function(
        "right_shift", lambda a, b: _shifted(np.right_shift, a, b), "same",
        ("bitwise_right_shift",), None, "int",
    ),
)  # fmt: skip

_OTHERS = (
    Function("where", np.where, "same", (), _of_choice),
    Function("to_int", _to_int, "int"),
    Function("to_real", lambda x: np.asarray(x) * 1.0, "real"),
    # A product that is 0 where its first factor is, though the other may be
    # infinite or NaN: a slope of the branch that was not taken.
    Function(
        "product_if", lambda a, b: np.where(a == 0, a, _quiet(np.multiply)(
            a, b)), "real", (), _of_product,
    ),
)  # fmt: skip

_OPERANDS = {
    **dict.fromkeys([row.name for row in _REALS], 1),
    "negative": 1, "absolute": 1, "sign": 1, "isnan": 1, "isinf": 1,
    "invert": 1, "to_int": 1, "to_real": 1, "where": 3,
}  # fmt: skip

_ALL = (*_REALS, *_ARITHMETIC, *_TRUTHS, *_BITS, *_OTHERS)
FUNCTIONS = {row.name: row for row in _ALL}

# By NumPy's and PyTorch's names. Those of whole truth values take bools.
BY_UFUNC = {name: row for row in _ALL for name in (row.name, *row.ufuncs)}
LOGICAL = {
    "logical_and": "bitwise_and",
    "logical_or": "bitwise_or",
    "logical_xor": "bitwise_xor",
    "logical_not": "invert",
}


# ---- Making nodes of operations ----


def converted(node: Node, kind: Kind) -> Node:
    """A node of a wider kind, or of bool for ``!= 0``."""
    if node.kind == kind:
        return node
    if node.is_constant:
        value = node.value
        return constant(
            bool(value) if kind == "bool"
            else float(value) if kind == "real" else int(value)
        )  # fmt: skip
    if kind == "bool":
        return apply("not_equal", node, constant(0))
    return nodes.make(f"to_{kind}", kind, (node,))


def apply(name: str, *args: Node) -> Node:
    """The node of an operation, with operands converted; or its constant."""
    row = FUNCTIONS[name]
    condition = (converted(args[0], "bool"),) if name == "where" else ()
    operands = args[len(condition) :]
    widest = max(nodes.widest(operands), row.least, key=nodes.KINDS.index)
    kind: Kind = widest if row.result == "same" else row.result
    if row.result in ("same", "real"):
        operands = tuple(converted(x, kind) for x in operands)
    elif row.result == "bool":
        if row.least == "real" and operands[0].kind != "real":
            return constant(False)  # an int is neither NaN nor infinite
        operands = _compared(name, operands)
    operands = *condition, *operands
    if all(x.is_constant for x in operands):
        return constant(_folded(row, kind, [x.value for x in operands]))
    same = _unchanged(name, operands)
    return same or nodes.make(name, kind, operands)


def _compared(name: str, operands: tuple[Node, ...]) -> tuple[Node, ...]:
    """Bools as ints, but for whether two of them are equal."""
    kinds = {x.kind for x in operands}
    equality = name in ("equal", "not_equal")
    if "bool" not in kinds or kinds == {"bool"} and equality:
        return operands
    return tuple(
        converted(x, "int") if x.kind == "bool" else x for x in operands
    )


def _folded(row: Function, kind: Kind, values: list[Any]) -> Any:
    """The value of an operation on constants; ints wrap, as int64 does."""
    if row.name in _EXACT and all(type(x) is int for x in values):
        exact = _EXACT[row.name](*values)
        return (exact + 2**63) % 2**64 - 2**63
    value = row.evaluate(*values)
    return {"bool": bool, "int": int, "real": float}[kind](value)


_EXACT: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negative": operator.neg,
}


def _unchanged(name: str, args: tuple[Node, ...]) -> Node | None:
    """The operand that the result equals, if a constant or a twin says so."""
    if name == "where":
        taken, first, other = args
        if taken.is_constant:
            return first if taken.value else other
        return first if first is other else None
    if name == "multiply" or name == "product_if":
        for x, factor in (args, args[::-1]):
            if nodes.same_constant(factor, 1):
                return x
    if name in ("add", "subtract") and args[0].kind == "int":
        if nodes.same_constant(args[1], 0):
            return args[0]
        if name == "add" and nodes.same_constant(args[0], 0):
            return args[1]
    if name in ("bitwise_and", "bitwise_or") and args[0].kind == "bool":
        for x, other in (args, args[::-1]):
            if other.is_constant:
                return x if other.value == (name == "bitwise_and") else other
    return None
