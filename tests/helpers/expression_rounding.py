"""What a graph's values may be off by, in arithmetic that rounds.

A running error analysis: beside each value stands a bound of its error, which
each operation moves by its derivative or between the ends of its operands,
and adds its own rounding to. Where the bound does not decide a comparison, a
floor or a branch, the value is in doubt, and so is what follows from it.
"""

from typing import NamedTuple

import numpy as np

from cuflash.expressions import nodes
from cuflash.expressions.functions import FUNCTIONS


class Bounded(NamedTuple):
    """Values, in float64, bounds of errors, and where nothing is known."""

    value: np.ndarray
    error: np.ndarray
    doubt: np.ndarray


class Arithmetic(NamedTuple):
    """What rounds.

    unit : of the format, half a unit in the last place of 1.
    library : of the result, an error of exp, pow and the like.
    argument : of their argument.
    inverse : of a quotient, if it may be a product with an inverse.
    tiny : an absolute error of every operation: underflow.
    most : above it is infinity.
    real : dtype of reals.
    """

    unit: float
    library: float
    argument: float
    inverse: float
    tiny: float
    most: float
    real: type


# Libraries: up to 4 units; ours of exp, exp2 and tanh with 16-bit elements to
# 2^-21, after an argument rounded twice (expression_functions.cuh).
_U32, _U64 = 2.0**-24, 2.0**-53
DOUBLE = Arithmetic(2 * _U64, 8 * _U64, 0, 0, 1e-300, 1e307, np.float64)
SINGLE = Arithmetic(_U32, 8 * _U32, 0, 0, 1e-37, 1e37, np.float32)
FAST = Arithmetic(_U32, 2.0**-20, 2 * _U32, 2 * _U32, 1e-37, 1e37, np.float32)

_MONOTONE = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh",
             "arctan", "erf", "erfc", "sqrt")  # fmt: skip
_DISCRETE = ("floor", "ceil", "trunc", "rint", "sign", "to_int")
_TRUTHS = ("less", "less_equal", "greater", "greater_equal", "equal",
           "not_equal")  # fmt: skip
# Rounded like a sum, by IEEE; a product's sum may be rounded once or twice.
_EXACT = ("sqrt",)


def bounded(root, leaves, arrays, numbers, arithmetic):
    """Return the `Bounded` values of a graph."""
    known = {}
    with np.errstate(all="ignore"):
        for node in nodes.in_order([root]):
            known[node] = _Rule(arithmetic, arrays, numbers, leaves).of(
                node, [known[x] for x in node.args]
            )
    return known[root]


def _exact(value):
    value = np.asarray(value)
    none = np.zeros(value.shape)
    return Bounded(value, none, none.astype(bool))


class _Rule(NamedTuple):
    arithmetic: Arithmetic
    arrays: list
    numbers: list
    leaves: dict

    def of(self, node, args):
        if node in self.leaves:
            value = self.leaves[node]
            kind = np.float64 if node.kind == "real" else np.int64
            return _exact(np.asarray(value, kind))
        if node.is_constant:
            return self.leaf(node, node.value)
        if node.op == "number":
            return self.leaf(node, self.numbers[node.value])
        if node.op == "size":
            slot, axis = node.value
            return _exact(np.int64(self.arrays[slot].shape[axis]))
        if node.op == "gather":
            return self.gather(node, args)
        doubt = np.logical_or.reduce(
            np.broadcast_arrays(*(x.doubt for x in args))
        )
        if node.kind == "real":
            found = self.real(node, args)
            return self.settled(found, args, doubt)
        return self.whole(node, args, doubt)

    def leaf(self, node, value):
        kind = {"bool": np.bool_, "int": np.int64}.get(node.kind)
        if kind is None:
            value = np.float64(self.arithmetic.real(value))
        return _exact(value if kind is None else kind(value))

    def gather(self, node, args):
        array = self.arrays[node.value[0]]
        index = np.broadcast_arrays(*(x.value for x in args))
        inside = np.ones(index[0].shape, bool)
        for x, size in zip(index, array.shape, strict=True):
            inside &= (x >= -size) & (x < size)
        read = np.zeros(inside.shape, array.dtype)
        read[inside] = array[tuple(x[inside] for x in index)]
        if node.kind == "real":
            read = read.astype(self.arithmetic.real)
        kind = {"bool": bool, "int": np.int64, "real": np.float64}[node.kind]
        doubt = np.logical_or.reduce(
            np.broadcast_arrays(*(x.doubt for x in args))
        )
        return _exact(read.astype(kind))._replace(doubt=doubt)

    # Reals: (value, error, new doubt).

    def real(self, node, args):
        if node.op == "to_real":
            value = args[0].value.astype(self.arithmetic.real)
            return value.astype(np.float64), 0.0 * value, False
        if node.op == "where":
            c, x, y = args
            return (
                np.where(c.value, x.value, y.value),
                np.where(c.value, x.error, y.error), False,
            )  # fmt: skip
        value = np.asarray(FUNCTIONS[node.op].evaluate(
            *(x.value for x in args)), np.float64)  # fmt: skip
        rule = _REALS.get(node.op)
        if rule is not None:
            error, doubt = rule(value, *args)
            if node.op == "divide":
                error = error + self.arithmetic.inverse * np.abs(value)
            return value, self.rounded(value, error), doubt
        if node.op in _MONOTONE or node.op in ("sin", "cos"):
            return value, *self.function(node.op, value, args[0])
        if node.op == "power":
            return value, *self.power(value, *args)
        return value, *self.discrete(node, args)

    def rounded(self, value, error):
        own = self.arithmetic.unit * np.abs(value) + self.arithmetic.tiny
        return error * (1 + 4 * self.arithmetic.unit) + own

    def function(self, name, value, x):
        a = self.arithmetic
        by = x.error + a.argument * np.abs(x.value)
        f = FUNCTIONS[name].evaluate
        if name in ("sin", "cos"):
            error = np.minimum(by, 2.0)
        else:
            error = np.maximum(*(
                np.abs(f(x.value + sign * by) - value) for sign in (-1, 1)
            ))  # fmt: skip
        unit = a.unit if name in _EXACT else a.library
        # CUDA's erfc errs by 5 units, ours by 6.5 (error_function.py).
        unit *= 2 if name == "erfc" else 1
        size = np.abs(value)
        if name == "tanh" and a is FAST:
            size = 1.0
        return 1.001 * error + unit * size + a.tiny, np.isnan(error)

    def power(self, value, x, p):
        a = self.arithmetic
        ends = [
            np.power(x.value + i * x.error, p.value + j * p.error)
            for i in (-1, 1) for j in (-1, 1)
        ]  # fmt: skip
        error = np.maximum.reduce([np.abs(y - value) for y in ends])
        low = (x.error > 0) & (x.value - x.error <= 0)
        size = np.abs(value)
        return 1.001 * error + a.library * size + a.tiny, low

    def discrete(self, node, args):
        """Of one operand, or a quotient: the same at both ends, or unknown."""
        (x,) = args
        f = FUNCTIONS[node.op].evaluate
        ends = [f(x.value + sign * x.error) for sign in (-1, 1)]
        same = (ends[0] == ends[1]) | (x.error == 0)
        return np.zeros(x.value.shape), ~same

    def settled(self, found, args, doubt):
        """Where a value is not finite, exact operands alone say so."""
        value, error, more = found
        inexact = np.logical_or.reduce(
            np.broadcast_arrays(*(x.error > 0 for x in args))
        )
        odd = ~np.isfinite(value) | ~np.isfinite(error)
        large = np.isfinite(value) & (np.abs(value) > self.arithmetic.most)
        doubt = doubt | more | large | (odd & inexact)
        return Bounded(value, np.where(odd, 0, error), doubt)

    # Ints and bools.

    def whole(self, node, args, doubt):
        values = [x.value for x in args]
        if node.op in _TRUTHS and any(x.kind == "real" for x in node.args):
            x, y = args
            error = x.error + y.error
            apart = np.abs(np.subtract(x.value, y.value, dtype=np.float64))
            near = (error > 0) & ~(apart > error)
            doubt = doubt | near
        elif node.op in ("isnan", "isinf", "to_int"):
            x = args[0]
            if node.op == "to_int" and node.args[0].kind == "real":
                doubt = doubt | self.discrete(node, args)[1]
        if node.op == "where":
            c, x, y = args
            doubt = c.doubt | np.where(c.value, x.doubt, y.doubt)
        value = np.asarray(FUNCTIONS[node.op].evaluate(*values))
        value = value.astype(bool if node.kind == "bool" else np.int64)
        return Bounded(value, np.zeros(value.shape), doubt)


def _quotient(x, y):
    """Return a / b, and a bound of its error."""
    quotient = x.value / y.value
    least = np.abs(y.value) - y.error
    error = (x.error + np.abs(quotient) * y.error) / least
    doubt = (y.error > 0) & ~(least > 0)
    return quotient, np.where(doubt, np.inf, error), doubt


def _divide(value, x, y):
    _, error, doubt = _quotient(x, y)
    return np.where((x.error == 0) & (y.error == 0), 0, error), doubt


def _whole_quotient(x, y):
    """Whether errors let a floor of a quotient fall elsewhere; its error."""
    quotient, error, doubt = _quotient(x, y)
    inexact = (x.error > 0) | (y.error > 0)
    error = error + 1e-6 * np.abs(quotient)
    moved = np.floor(quotient - error) != np.floor(quotient + error)
    return quotient, inexact & (moved | doubt)


def _remainder(value, x, y):
    quotient, doubt = _whole_quotient(x, y)
    error = x.error + np.abs(np.floor(quotient)) * y.error
    error = error + 1.2e-7 * np.abs(y.value) * (value != 0)  # rest + b
    exact = (x.error == 0) & (y.error == 0) & ~np.isfinite(value)
    return np.where(exact, 0, error), doubt


def _floor_divide(value, x, y):
    _, doubt = _whole_quotient(x, y)
    large = np.where(np.abs(value) < 2**22, 0, 2.4e-7 * np.abs(value))
    return large, doubt


def _product(value, x, y):
    error = (
        np.abs(x.value) * y.error + np.abs(y.value) * x.error
        + x.error * y.error
    )  # fmt: skip
    exact = (x.error == 0) & (y.error == 0)
    return np.where(exact, 0, error), False


def _product_if(value, x, y):
    error, _ = _product(value, x, y)
    none = (x.value == 0) & (x.error == 0)
    return np.where(none, 0, error), False


def _sum(value, x, y):
    return x.error + y.error, False


def _extreme(value, x, y):
    return np.maximum(x.error, y.error), False


_REALS = {
    "add": _sum, "subtract": _sum, "multiply": _product,
    "product_if": _product_if, "divide": _divide, "remainder": _remainder,
    "floor_divide": _floor_divide, "minimum": _extreme, "maximum": _extreme,
    "negative": lambda value, x: (x.error, False),
    "absolute": lambda value, x: (x.error, False),
}  # fmt: skip


def disagreements(got, want):
    """Return where values are further from the bounded ones than allowed."""
    value = want.value
    if np.asarray(got).dtype.kind in "biu":
        wrong = got != value
    else:
        got = np.asarray(got, np.float64)
        same = (got == value) | (np.isnan(got) & np.isnan(value))
        with np.errstate(invalid="ignore"):
            wrong = ~(same | (np.abs(got - value) <= want.error))
    return wrong & ~want.doubt


def assert_within(got, want, *what):
    """Compare values with bounded ones; `what` names them in the message."""
    wrong = disagreements(got, want)
    if np.any(wrong):
        at = tuple(map(int, np.argwhere(wrong)[0]))
        raise AssertionError(
            f"{what}: {np.count_nonzero(wrong)} of {wrong.size} values are"
            f" off, first at {at}: {got[at]!r}, expected {want.value[at]!r}"
            f" within {want.error[at]:.3g}"
        )
