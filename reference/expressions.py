r"""A user's own score and mask: functions of a score and its indices.

``score_mod`` and ``mask_mod`` are functions that the user writes,

.. math::
    x_{ij} &\to f(x_{ij}, b, h, i, j) \\
    visible_{ij} &\to visible_{ij} \wedge g(b, h, i, j),

whose arguments are the score after softcap, ALiBi and bias, the index b of
the sequence, h of the query head, i of the query and j of the key, each
counted from 0 ([FX] Dong et al. 2024, arXiv:2412.05496). They read
named arrays, ``mod_arrays``, and may name ``seqlen_q`` and ``seqlen_k`` among
their arguments. Here they are called as they are, on the arrays of a tile.

The gradient needs the derivatives of f with respect to the score and to each
number a that f reads from an array. With dS that of the softmax's input, P
(dP - D),

.. math::
    dX_{ij} &= f_x\, dS_{ij} \\
    da_n &= \sum_{ij} f_{a}\, dS_{ij}
    \quad \text{over all pairs that read } a_n.

They come from dual numbers: `Dual` is a value and its slopes with respect to
the score and to what each index expression (a `Gather`) reads, and every
operation of f multiplies the slopes by its own derivative,

.. math:: dy = \sum_n \frac{\partial y}{\partial x_n} dx_n,

where a derivative of 0 stays 0, whatever it multiplies.

``where``, ``minimum`` and ``maximum`` have the derivative of the branch that
they take, the first argument's if both are equal; that of ``abs`` is 0 at 0.

An index from -n to -1 counts from the end of an axis of length n. Any other
index outside the axis reads 0, or False. ``//`` and ``%`` round down; of
integers both are 0 if the divisor is. A shift is by 0 to 62 bits.

Example
-------
A table of relative positions. Its slope is 1 wherever it is read, but the
score's is the score's sign:

>>> import numpy as np
>>> from cuflash.reference import expressions
>>> from cuflash.reference.expressions import HeadIndices
>>> def relative(score, b, h, q_idx, kv_idx, *, table):
...     return abs(score) + table[q_idx - kv_idx + 1]
>>> table = np.array([10.0, 20.0, 30.0])
>>> s = np.array([[1.0, -2.0, 3.0]])
>>> place = expressions.Place(np.array([1]), np.arange(3), 2, 3, HeadIndices())
>>> result = expressions.score(
...     relative, s, place, {"table": table}, gradients=("table",)
... )
>>> print(result.s, result.slope)
[[31. 22. 13.]] [[ 1. -1.  1.]]
>>> dtable = {"table": np.zeros(3)}
>>> expressions.add_gradients(dtable, result.gathers, np.full((1, 3), 0.5))
>>> print(dtable["table"])
[0.5 0.5 0.5]

A mask, and an index that leaves its array:

>>> def documents(b, h, q_idx, kv_idx, *, ids):
...     return ids[q_idx] == ids[kv_idx + 1]
>>> print(expressions.visible(documents, place, {"ids": np.array([4, 0, 0])}))
[[ True  True  True]]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .scores import quiet

Function = Callable[..., Any]
# What a slope is with respect to, beside gathers; and along a direction.
SCORE, MOTION = "score", "motion"


class HeadIndices(NamedTuple):
    """The index of each head of q, and of its sequence.

    Attributes
    ----------
    batch, head : int or ndarray of int
        Broadcastable to the leading axes of q.
    """

    batch: np.ndarray | int = 0
    head: np.ndarray | int = 0

    @classmethod
    def of(cls, leading: tuple[int, ...]) -> HeadIndices:
        """Number the heads of leading axes (), (heads,) or (batch, heads).

        Raises
        ------
        ValueError
            For more axes.
        """
        if len(leading) > 2:
            raise ValueError(
                f"which of the axes {leading} are batch and heads? A call "
                "with score_mod or mask_mod needs head_indices"
            )
        *batch, head = leading or (1,)
        of_head = np.arange(head) if leading else 0
        return cls(np.arange(batch[0])[:, None] if batch else 0, of_head)


class Place(NamedTuple):
    """Where the pairs of a tile are.

    Attributes
    ----------
    query, key : ndarray of int, (rows,) and (keys,)
        Indices within the sequence.
    seqlen_q, seqlen_k : int
        Lengths of the sequence.
    heads : HeadIndices
    """

    query: np.ndarray
    key: np.ndarray
    seqlen_q: int
    seqlen_k: int
    heads: HeadIndices

    def indices(self) -> list[Dual]:
        """Return b, h, q_idx and kv_idx, broadcastable to all pairs."""
        b, h = (np.asarray(x)[..., None, None] for x in self.heads)
        return [Dual(x) for x in (b, h, self.query[:, None], self.key)]


class Modified(NamedTuple):
    """Scores after score_mod, and its derivatives.

    Attributes
    ----------
    s : ndarray, (..., rows, keys)
    slope : ndarray or float, broadcastable to s
        With respect to the score that score_mod was given.
    gathers : dict of Gather to ndarray, broadcastable to s
        With respect to what each of them reads.
    """

    s: np.ndarray
    slope: np.ndarray | float
    gathers: dict[Gather, np.ndarray]


class Moving(NamedTuple):
    """How a tile's scores move in a direction, and their derivatives.

    Attributes
    ----------
    w, slope : ndarray or float, broadcastable to the tile
        Tangents of the score after score_mod, and of `Modified.slope`.
    gathers : dict of Gather to ndarray
        Tangents of `Modified.gathers`.
    """

    w: np.ndarray
    slope: np.ndarray | float
    gathers: dict[Gather, np.ndarray]


@quiet
def score(
    function: Function,
    s: np.ndarray,
    place: Place,
    arrays: Mapping[str, Any],
    gradients: tuple[str, ...] = (),
) -> Modified:
    """Return f of a tile's scores, and its derivatives.

    Parameters
    ----------
    function : callable
        score_mod.
    s : ndarray, (..., rows, keys)
    place : Place
    arrays : dict of str to array_like or number
        mod_arrays.
    gradients : tuple of str
        The arrays whose gradients are needed.
    """
    own = Dual(s, {SCORE: np.ones(())})
    named = _arguments(function, place, arrays, gradients)
    result = _called(function, own, place, named)
    slopes = dict(result.slopes)
    slope = slopes.pop(SCORE, 0.0)
    found = np.broadcast_to(result.value, s.shape).astype(np.float64)
    return Modified(found, slope, slopes)


@quiet
def moving(
    function: Function,
    s: np.ndarray,
    place: Place,
    arrays: Mapping[str, Any],
    s_dot: np.ndarray,
    dots: Mapping[str, np.ndarray],
    gradients: tuple[str, ...] = (),
) -> Moving:
    """Return how f of a tile's scores moves, and its derivatives.

    Parameters
    ----------
    function, s, place, arrays, gradients
        As in `score`.
    s_dot : ndarray, broadcastable to s
        The tangent of s.
    dots : dict of str to ndarray
        Tangents of some of the arrays.
    """
    own = Dual(s, {SCORE: np.ones(()), MOTION: np.asarray(s_dot)})
    named = _arguments(function, place, arrays, gradients, dots)
    result = _called(function, own, place, named)
    w = result.slopes.get(MOTION, np.zeros(()))
    slopes = dict(result.bends)
    slope = slopes.pop(SCORE, 0.0)
    return Moving(w, slope, slopes)


def _called(
    function: Function, own: Dual, place: Place, named: dict[str, Any]
) -> Dual:
    """Return what score_mod returns."""
    result = _dual(function(own, *place.indices(), **named))
    if result.value.dtype.kind not in "fiu":
        raise TypeError(
            f"score_mod returned {result.value.dtype}, which is no score"
        )
    return result


@quiet
def visible(
    function: Function, place: Place, arrays: Mapping[str, Any]
) -> np.ndarray:
    """Return which of a tile's pairs are visible, (..., rows, keys).

    Parameters
    ----------
    function : callable
        mask_mod.
    place, arrays
        As in `score`.
    """
    named = _arguments(function, place, arrays, ())
    result = _dual(function(*place.indices(), **named)).value
    if result.dtype != bool:
        raise TypeError(f"mask_mod returned {result.dtype}, not bool")
    pairs = len(place.query), len(place.key)
    return np.broadcast_to(result, np.broadcast_shapes(result.shape, pairs))


def add_gradients(
    totals: dict[str, np.ndarray],
    gathers: Mapping[Gather, np.ndarray],
    ds: np.ndarray,
    visible: np.ndarray | None = None,
) -> None:
    r"""Add the terms of a tile, :math:`da_n \mathrel{+}= f_a dS_{ij}`.

    Parameters
    ----------
    totals : dict of str to ndarray of float64
        By the names of the arrays; changed in place.
    gathers
        As in `Modified`.
    ds : ndarray, (..., rows, keys)
        The gradient of the scores after score_mod.
    visible : ndarray of bool, broadcastable to ds, or None
        Other pairs add nothing, whatever their slopes.
    """
    for gather, slope in gathers.items():
        with np.errstate(all="ignore"):
            terms = np.broadcast_to(slope * ds, ds.shape)
        reads = gather.inside if visible is None else gather.inside & visible
        reads = np.broadcast_to(reads, ds.shape)
        index = [np.broadcast_to(x, ds.shape)[reads] for x in gather.index]
        total = totals[gather.name][None]  # an array may have no axis
        zero = np.zeros(terms[reads].shape, np.int64)
        with np.errstate(all="ignore"):
            np.add.at(total, (zero, *index), terms[reads])


def _arguments(
    function: Function,
    place: Place,
    arrays: Mapping[str, Any],
    gradients: tuple[str, ...],
    dots: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Return the named arguments that a function has."""
    moved = dots or {}
    given: dict[str, Any] = {
        name: Dual(x)
        if isinstance(x, (bool, int, float, np.generic))
        else Array(name, x, name in gradients, moved.get(name))
        for name, x in arrays.items()
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
    lengths = {
        "seqlen_q": Dual(place.seqlen_q), "seqlen_k": Dual(place.seqlen_k)
    }  # fmt: skip
    own = given if takes_all else {}
    given |= lengths
    return own | {name: x for name, x in given.items() if name in parameters}


# Arrays ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Gather:
    """What one expression such as ``table[h, i - j]`` reads.

    Attributes
    ----------
    name : str
        The array's.
    index : tuple of ndarray of int
        One of each axis, broadcastable to the tile's pairs; 0 where outside.
    inside : ndarray of bool
        Where all indices are in the array.
    """

    name: str
    index: tuple[np.ndarray, ...]
    inside: np.ndarray


class Array:
    """One of mod_arrays: it can be read by indices, and nothing else.

    Parameters
    ----------
    name : str
    values : array_like
    needs_gradient : bool
    dot : array_like, optional
        The tangent of values.

    Attributes
    ----------
    shape : tuple of int
    """

    def __init__(
        self,
        name: str,
        values: np.ndarray,
        needs_gradient: bool,
        dot: np.ndarray | None = None,
    ) -> None:
        self.name, self.values = name, _wide(values)
        self.dot = None if dot is None else _wide(dot)
        self.needs_gradient, self.shape = needs_gradient, self.values.shape

    def __getitem__(self, index: Any) -> Dual:
        """Return what indices, one an axis, read."""
        several = index if isinstance(index, tuple) else (index,)
        own, shape = [_dual(x).value for x in several], self.shape
        for x in own:
            if x.dtype.kind not in "biu":
                raise IndexError(f"an index of {self.name} is {x.dtype}")
        if len(own) != len(shape):
            raise IndexError(
                f"{self.name} has {len(shape)} axes, not {len(own)}"
            )
        inside = np.array(True)
        for x, n in zip(own, shape, strict=True):
            inside = inside & (-n <= x) & (x < n)
        safe = tuple(
            np.where(inside, np.where(x < 0, x + n, x), 0)
            for x, n in zip(own, shape, strict=True)
        )
        nothing = np.zeros((), self.values.dtype)
        if 0 in shape:
            return Dual(np.broadcast_to(nothing, inside.shape))
        read = Dual(np.where(inside, self.values[safe], nothing))
        if self.needs_gradient:
            read.slopes[Gather(self.name, safe, inside)] = np.ones(())
        if self.dot is not None:
            read.slopes[MOTION] = np.where(inside, self.dot[safe], 0.0)
        return read


def _wide(x: Any) -> np.ndarray:
    """Return bool, int64 or float64: what a number is computed in."""
    x = np.asarray(x)
    if x.dtype == bool:
        return x
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


# Dual numbers ---------------------------------------------------------------


class Dual(NDArrayOperatorsMixin):
    """Values, and their slopes.

    Operators and NumPy's functions give Duals. A function of more than its
    elements, a store and ``if`` are errors.

    Attributes
    ----------
    value : ndarray of bool, int64 or float64
    slopes : dict of SCORE, Gather or MOTION to ndarray
        The derivatives that are not 0, broadcastable to value.
    bends : dict of SCORE or Gather to ndarray
        The derivatives of these slopes along MOTION.
    """

    def __init__(
        self,
        value: Any,
        slopes: dict[Any, np.ndarray] | None = None,
        bends: dict[Any, np.ndarray] | None = None,
    ) -> None:
        self.value = _wide(value)
        self.slopes = {} if slopes is None else slopes
        self.bends = {} if bends is None else bends

    def astype(self, dtype: Any) -> Dual:
        """Return bools, integers or reals.

        An integer of a real is rounded towards 0; 0 if 64 bits do not hold it.
        Integers that are cut to 32 bits wrap; what follows has 64 again.
        """
        kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
        if kind == "b":
            return Dual(self.value != 0)
        if kind == "u" or (kind == "i" and size < 4):
            raise TypeError(f"{np.dtype(dtype)} wraps: write x.astype(int)")
        if kind == "i":
            if self.value.dtype.kind == "i":
                return Dual(self.value.astype(dtype))
            held = np.abs(self.value) < 2.0**63  # False for NaN
            return Dual(np.where(held, self.value, 0).astype(np.int64))
        return Dual(self.value.astype(np.float64), self.slopes, self.bends)

    def __bool__(self) -> bool:
        raise TypeError(
            "`if`, `and`, `or` and `not` need one truth value, not a tile's: "
            "write np.where, &, | and ~"
        )

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Dual:
        if method != "__call__" or options or ufunc.nout > 1:
            raise TypeError(f"np.{ufunc.__name__} of a whole tile")
        return _apply(ufunc, *map(_dual, inputs))

    def __array_function__(
        self, function: Any, types: Any, inputs: Any, options: Any
    ) -> Dual:
        own = _FUNCTIONS.get(function)
        if own is None:
            raise TypeError(f"np.{function.__name__} of a whole tile")
        return own(*inputs, **options)


def _dual(x: Any) -> Dual:
    """Return a number or a Dual as a Dual."""
    if isinstance(x, Dual):
        return x
    if isinstance(x, np.ndarray) and not x.ndim:
        x = x[()]  # a scalar of NumPy's, as a comparison passes it on
    if not isinstance(x, (bool, int, float, np.generic)):
        raise TypeError(f"{type(x).__name__} is no number of a pair")
    return Dual(x)


def _apply(ufunc: np.ufunc, *inputs: Dual) -> Dual:
    r"""Return :math:`y`, and :math:`dy = \sum_n (\partial y / x_n) dx_n`."""
    if ufunc in (np.left_shift, np.right_shift):
        inputs = inputs[0], _clip(inputs[1], 0, 62)
    values = [x.value for x in inputs]
    if all(x.dtype == bool for x in values) and ufunc not in _OF_BOOLS:
        values = [x.astype(np.int64) for x in values]
    y = ufunc(*values)
    if ufunc in _BRANCHES:
        taken = _where(_apply(_BRANCHES[ufunc], *inputs), *inputs)
        return Dual(y, taken.slopes, taken.bends)
    if ufunc in _FLAT or not any(x.slopes for x in inputs):
        return Dual(y)
    slopes_of = _SLOPES.get(ufunc) or _SCIPYS.get(ufunc.__name__)
    if slopes_of is None:
        raise TypeError(f"np.{ufunc.__name__} has no derivative here")
    factors = slopes_of(y, *values)
    slopes: dict[Any, np.ndarray] = {}
    for x, factor in zip(inputs, factors, strict=True):
        for seed, slope in x.slopes.items():
            term = np.where(np.equal(factor, 0), 0.0, factor * slope)
            slopes[seed] = slopes.get(seed, 0.0) + term
    return Dual(y, slopes, _bends(slopes_of, y, values, inputs, slopes))


def _bends(
    slopes_of: Callable[..., tuple[Any, ...]],
    y: Any,
    values: list[Any],
    inputs: tuple[Dual, ...],
    slopes: dict[Any, np.ndarray],
) -> dict[Any, np.ndarray]:
    r"""Return how slopes move, :math:`\sum_n (f_n)' dx_n + f_n (dx_n)'`.

    The partial derivatives f_n move with y and the operands: they are
    computed of these as Duals.
    """
    if MOTION not in slopes or len(slopes) == 1:
        return {}
    moving = [
        Dual(
            np.asarray(x, np.float64),
            {MOTION: dual.slopes.get(MOTION, np.zeros(()))},
        )
        for x, dual in zip(values, inputs, strict=True)
    ]
    factors = slopes_of(Dual(y, {MOTION: slopes[MOTION]}), *moving)
    bends: dict[Any, np.ndarray] = {}
    for x, factor in zip(inputs, map(_dual, factors), strict=True):
        for seed in (x.slopes | x.bends).keys() - {MOTION}:
            for a, b in (
                (x.slopes.get(seed, 0.0), factor.slopes.get(MOTION, 0.0)),
                (factor.value, x.bends.get(seed, 0.0)),
            ):
                none = np.equal(a, 0) | np.equal(b, 0)
                term = np.where(none, 0.0, np.multiply(a, b))
                bends[seed] = bends.get(seed, 0.0) + term
    return bends


def _where(condition: Any, x: Any, y: Any) -> Dual:
    """Return x or y, with the slopes of the one that is taken."""
    takes_x, x, y = _dual(condition).value != 0, _dual(x), _dual(y)
    return Dual(
        np.where(takes_x, x.value, y.value),
        *(
            {s: np.where(takes_x, a.get(s, 0.0), b.get(s, 0.0)) for s in a | b}
            for a, b in ((x.slopes, y.slopes), (x.bends, y.bends))
        ),
    )


def _clip(x: Any, a_min: Any = None, a_max: Any = None, **named: Any) -> Dual:
    """Return minimum(maximum(x, a_min), a_max); NumPy's min and max, too."""
    x, a_min = _dual(x), named.get("min", a_min)
    a_max = named.get("max", a_max)
    if a_min is not None:
        x = _apply(np.maximum, x, _dual(a_min))
    if a_max is not None:
        x = _apply(np.minimum, x, _dual(a_max))
    return x


_FUNCTIONS: dict[Any, Callable[..., Dual]] = {
    np.where: _where,
    np.clip: _clip,
}

# Functions that take one of their arguments, and when it is the first.
_BRANCHES = {
    np.minimum: np.less_equal, np.fmin: np.less_equal,
    np.maximum: np.greater_equal, np.fmax: np.greater_equal,
}  # fmt: skip

_OF_BOOLS = {
    np.logical_and, np.logical_or, np.logical_xor, np.logical_not,
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert,
    np.equal, np.not_equal, np.less, np.less_equal,
    np.greater, np.greater_equal,
}  # fmt: skip

# The derivative is 0, or the result is no real number.
_FLAT = _OF_BOOLS | {
    np.floor, np.ceil, np.trunc, np.rint, np.sign, np.floor_divide,
    np.isnan, np.isinf, np.isfinite, np.signbit,
    np.left_shift, np.right_shift,
}  # fmt: skip


def _power_slopes(y: Any, x: Any, n: Any) -> tuple[Any, Any]:
    """Return n x^(n-1) and x^n log(x), 0 where n or x^n is 0.

    Where n is 0, the first still moves with n, by x^(n-1).
    """
    x, n = x * 1.0, n * 1.0
    below = x ** (n - 1)
    of_x = np.where((n == 0) & ~np.isfinite(below), 0.0, n * below)
    return of_x, np.where(y == 0, 0.0, y * np.log(x))


_ERROR = 2 / np.sqrt(np.pi)
# The derivatives of y = f(x, ...) with respect to each argument.
_SLOPES: dict[np.ufunc, Callable[..., tuple[Any, ...]]] = {
    np.positive: lambda y, x: (1.0,),
    np.negative: lambda y, x: (-1.0,),
    np.add: lambda y, a, b: (1.0, 1.0),
    np.subtract: lambda y, a, b: (1.0, -1.0),
    np.multiply: lambda y, a, b: (b, a),
    np.true_divide: lambda y, a, b: (1 / b, -y / b),
    np.remainder: lambda y, a, b: (1.0, -np.floor(a / b)),
    np.power: _power_slopes,
    np.float_power: _power_slopes,
    np.absolute: lambda y, x: (np.sign(x),),
    np.fabs: lambda y, x: (np.sign(x),),
    np.square: lambda y, x: (2 * x,),
    np.reciprocal: lambda y, x: (-y * y,),
    np.sqrt: lambda y, x: (0.5 / y,),
    np.exp: lambda y, x: (y,),
    np.exp2: lambda y, x: (y * np.log(2),),
    np.expm1: lambda y, x: (y + 1,),
    np.log: lambda y, x: (1 / x,),
    np.log2: lambda y, x: (1 / (x * np.log(2)),),
    np.log10: lambda y, x: (1 / (x * np.log(10)),),
    np.log1p: lambda y, x: (1 / (1 + x),),
    np.sin: lambda y, x: (np.cos(x),),
    np.cos: lambda y, x: (-np.sin(x),),
    np.tan: lambda y, x: (1 + y * y,),
    np.arctan: lambda y, x: (1 / (1 + x * x),),
    np.sinh: lambda y, x: (np.cosh(x),),
    np.cosh: lambda y, x: (np.sinh(x),),
    np.tanh: lambda y, x: (1 - y * y,),
    np.fmod: lambda y, a, b: (1.0, -np.trunc(a / b)),
    np.logaddexp: lambda y, a, b: (np.exp(a - y), np.exp(b - y)),
}
# The same of SciPy's functions, by name: NumPy has none of these.
_SCIPYS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "erf": lambda y, x: (_ERROR * np.exp(-x * x),),
    "erfc": lambda y, x: (-_ERROR * np.exp(-x * x),),
}
