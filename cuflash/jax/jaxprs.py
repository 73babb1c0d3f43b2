"""Graphs of functions that are written with JAX's functions: of their jaxprs.

What depends on the arguments of a pair becomes nodes. What does not, such as
`jnp.exp(table)`, is computed by JAX before the call, and read from arrays.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from cuflash.expressions import nodes, trace
from cuflash.expressions.functions import apply, converted
from cuflash.expressions.nodes import INDICES, LENGTHS, SCORE, Kind, Node

# Elements of an array that are computed for each pair, one by one.
_MOST = 64


class Operands:
    """The arrays that graphs read, in the order of their slots.

    Parameters
    ----------
    arrays : mapping of str to array
        Those of `mod_arrays`.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.names = [*arrays]
        self.arrays = [*arrays.values()]

    def slot(self, array: Any) -> int:
        """That of an array, which is a new one unless it is known."""
        for i, x in enumerate(self.arrays):
            if x is array:
                return i
        self.names.append(f"array_{len(self.arrays)}")
        self.arrays.append(array)
        return len(self.arrays) - 1

    def element(self, array: Any, indices: Sequence[Node]) -> Node:
        """An element of an array; of one without axes, its number."""
        if not array.ndim:
            indices = [nodes.constant(0)]
        dtype = np.dtype(array.dtype)
        kind: Kind = "real"
        if dtype.kind in "biu":
            kind = "bool" if dtype.kind == "b" else "int"
        read = (self.slot(array), dtype.name)
        return nodes.make("gather", kind, tuple(indices), read)


def record(
    function: Callable[..., Any],
    role: str,
    named: Mapping[str, Any],
    wide: Any,
    operands: Operands,
) -> Any:
    """The node of a function's result; its arguments' nodes are the roles'.

    Parameters
    ----------
    function : callable
    role : str
    named : mapping
        Arrays, and nodes of numbers, by the names of keyword arguments.
    wide : dtype
        Of scores.
    operands : Operands
        Gets the arrays that are read.
    """
    own = {x: nodes.index(x) for x in LENGTHS} | dict(named)
    taken = keywords_of(function)
    names = own if taken is None else [x for x in taken if x in own]
    given = {x: own[x] for x in names}
    symbols = {x: y for x, y in given.items() if isinstance(y, Node)}
    arrays = {x: y for x, y in given.items() if x not in symbols}
    leaves: list[Node] = [nodes.index(x) for x in INDICES]
    if role == "score_mod":
        leaves = [SCORE, *leaves]

    def call(leaves: Any, symbols: Any, arrays: Any) -> Any:
        return function(*leaves, **symbols, **arrays)

    made = jax.make_jaxpr(call)(
        [_like(x, wide) for x in leaves],
        {x: _like(y, wide) for x, y in symbols.items()},
        arrays,
    )
    if len(made.out_avals) != 1 or made.out_avals[0].shape:
        trace.refuse(
            f"{role} returns {[str(x) for x in made.out_avals]}",
            "return one number of a pair",
        )
    values = [*leaves, *jax.tree.leaves(symbols), *jax.tree.leaves(arrays)]
    reader = _Reader(operands, role == "score_mod")
    wrapped = [_one(x) if isinstance(x, Node) else x for x in values]
    (result,) = reader.run(made.jaxpr, made.consts, wrapped)
    return reader.nodes_of(result).item()


def keywords_of(function: Any) -> list[str] | None:
    """The names of a function's keyword arguments; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return None
    return [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]


def _like(node: Node, wide: Any) -> jax.ShapeDtypeStruct:
    dtype = {"bool": np.bool_, "int": np.int32, "real": wide}[node.kind]
    return jax.ShapeDtypeStruct((), dtype)


def _one(node: Node) -> np.ndarray:
    found = np.empty((), object)
    found[()] = node
    return found


def _array_of(values: Any, shape: Sequence[int]) -> np.ndarray:
    found = np.empty(tuple(shape), object)
    found[...] = values
    return found


class _View:
    """A part of an array that a pair chooses, of which elements are read.

    Attributes
    ----------
    array
    starts : list of Node
        Where it begins, along each axis of the array.
    axes : list of (int or None)
        The axis of the view that each axis of the array is.
    shape : tuple of int
    """

    def __init__(
        self,
        array: Any,
        starts: list[Node],
        axes: list[int | None],
        shape: tuple[int, ...],
    ) -> None:
        self.array, self.starts = array, starts
        self.axes, self.shape = axes, shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def sliced(self, starts: Sequence[Node], sizes: Sequence[int]) -> _View:
        """A part of it, moved inside as XLA does."""
        own = [*self.starts]
        for i, axis in enumerate(self.axes):
            if axis is not None:
                most = self.shape[axis] - sizes[axis]
                own[i] = apply("add", own[i], _within(starts[axis], most))
        return _View(self.array, own, self.axes, tuple(sizes))

    def squeezed(self, dimensions: Sequence[int]) -> _View:
        """Without axes of length 1."""
        kept = [x for x in range(self.ndim) if x not in dimensions]
        axes = [kept.index(x) if x in kept else None for x in self.axes]
        return _View(
            self.array, self.starts, axes, tuple(self.shape[x] for x in kept)
        )


def _within(index: Node, most: int) -> Node:
    if most == 0:
        return nodes.constant(0)
    index = apply("maximum", converted(index, "int"), nodes.constant(0))
    return apply("minimum", index, nodes.constant(most))


class _Reader:
    """Runs a jaxpr on arrays, on views of them, and on arrays of nodes.

    Attributes
    ----------
    operands : Operands
    is_score : bool
        Whether the result is a score, which has derivatives.
    """

    def __init__(self, operands: Operands, is_score: bool) -> None:
        self.operands, self.is_score = operands, is_score

    def run(
        self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]
    ) -> list[Any]:
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, values, strict=True))

        def read(x: Any) -> Any:
            return x.val if hasattr(x, "val") else known[x]

        for eqn in jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            if any(isinstance(x, (_View, np.ndarray)) and _is_ours(x)
                   for x in given):  # fmt: skip
                found = self._of_pairs(eqn, given)
            else:
                found = _by_jax(eqn, given)
            known |= dict(zip(eqn.outvars, found, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _of_pairs(self, eqn: Any, given: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = next((params[x] for x in _INNER if x in params), None)
        if inner is not None and name not in _LOOPS:
            whole = _whole(params.get("name"), inner)
            if whole is None and name.startswith("custom_"):
                whole = self._own_derivative(eqn, inner, given)
            if whole is not None:
                return [self._each(whole, given, eqn)]
            closed = hasattr(inner, "consts")
            return self.run(
                inner.jaxpr if closed else inner,
                inner.consts if closed else (), given,
            )  # fmt: skip
        if name == "cond":
            return self._chosen(params["branches"], given)
        if name == "dynamic_slice":
            return [self._slice(params["slice_sizes"], *given)]
        if name == "squeeze" and isinstance(given[0], _View):
            return [given[0].squeezed(params["dimensions"])]
        if name == "gather":
            return [self._gather(eqn, *given)]
        if name in _EACH or name in _SUMS:
            _check_integers(eqn)
        if name in _SHAPES:
            arrays = [self.nodes_of(x) for x in given]
            return [_SHAPES[name](params, *arrays)]
        if name not in _EACH:
            _refuse(eqn, f"{name} has no rule", _CURES.get(name, _CURE))
        return [self._each(functools.partial(_EACH[name], params), given, eqn)]

    def _each(self, function: Any, given: list[Any], eqn: Any) -> Any:
        arrays = np.broadcast_arrays(*map(self.nodes_of, given))
        shape = eqn.outvars[0].aval.shape
        return _array_of(
            np.frompyfunc(function, len(arrays), 1)(*arrays), shape
        )

    def _own_derivative(self, eqn: Any, inner: Any, given: list[Any]) -> Any:
        """The rule of one of JAX's functions that have their own derivative.

        None where no derivative counts: the function's body is read.
        """
        of = inner.jaxpr.debug_info
        if not trace.is_users(of.func_filename or "<unknown>"):
            rule = _OWN_DERIVATIVES.get(of.func_name)
            if rule is not None:
                return rule
        if self.is_score and any(map(_moves, given)):
            _refuse(
                eqn, f"{of.func_name} has a derivative of its own",
                "write its value without jax.custom_jvp and jax.custom_vjp:"
                " scores are differentiated by the rules of what they"
                " compute",
            )  # fmt: skip
        return None

    def nodes_of(self, value: Any) -> np.ndarray:
        """The elements of a value: nodes."""
        if isinstance(value, np.ndarray) and value.dtype == object:
            return value
        if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
            array = np.asarray(value)
            return _array_of(
                np.frompyfunc(lambda x: nodes.constant(x), 1, 1)(
                    array.astype(object)
                ),
                array.shape,
            )
        if math.prod(value.shape) > _MOST:
            trace.refuse(
                f"an array of shape {tuple(value.shape)} is computed for each"
                " pair",
                f"read elements of it, or reduce it to {_MOST} at most",
            )
        found = np.empty(value.shape, object)
        for at in np.ndindex(*value.shape):
            found[at] = self._element(value, [nodes.constant(x) for x in at])
        return found

    def _element(self, value: Any, at: Sequence[Node]) -> Node:
        if not isinstance(value, _View):
            return self.operands.element(value, at)
        indices = [
            start if axis is None else apply("add", start, at[axis])
            for start, axis in zip(value.starts, value.axes, strict=True)
        ]
        return self.operands.element(value.array, indices)

    def _slice(self, sizes: Sequence[int], x: Any, *starts: Any) -> Any:
        first = [self.nodes_of(s).item() for s in starts]
        if isinstance(x, np.ndarray) and _is_ours(x):
            trace.refuse(
                "an array that differs from pair to pair is read by an index",
                "choose by jnp.where",
            )
        if not isinstance(x, _View):
            zeros = [nodes.constant(0)] * x.ndim
            x = _View(x, zeros, [*range(x.ndim)], tuple(x.shape))
        found = x.sliced(first, sizes)
        if math.prod(found.shape) == 1:
            return self.nodes_of(found)
        return found

    def _gather(self, eqn: Any, x: Any, indices: Any) -> Any:
        params, rows = eqn.params, self.nodes_of(indices)
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        if set(sizes) != {1} or numbers.operand_batching_dims:
            _refuse(eqn, "a gather of slices", "read one element: table[i, j]")
        mode = str(params["mode"]).upper()
        found = np.empty(rows.shape[:-1], object)
        for at in np.ndindex(*found.shape):
            index = [nodes.constant(0)] * len(x.shape)
            inside = nodes.constant(True)
            for axis, i in zip(numbers.start_index_map, rows[at], strict=True):
                index[axis] = _within(i, x.shape[axis] - 1)
                same = apply("equal", converted(i, "int"), index[axis])
                inside = apply("bitwise_and", inside, same)
            value = self._element(x, index)
            if "FILL" in mode:
                fill = {"real": np.nan, "int": -(2**31), "bool": True}
                given = params["fill_value"]
                other = fill[value.kind] if given is None else given
                value = apply("where", inside, value, nodes.constant(other))
            found[at] = value
        return _array_of(found, eqn.outvars[0].aval.shape)

    def _chosen(self, branches: Any, given: list[Any]) -> list[Any]:
        """All branches, of which a pair takes one."""
        which = self.nodes_of(given[0]).item()
        found = [self.run(x.jaxpr, x.consts, given[1:]) for x in branches]
        results = []
        for values in zip(*found, strict=True):
            *others, result = map(self.nodes_of, values)
            for i, x in reversed([*enumerate(others)]):
                here = apply("less_equal", which, nodes.constant(i))
                choose = functools.partial(apply, "where", here)
                result = _array_of(
                    np.frompyfunc(choose, 2, 1)(x, result), x.shape
                )
            results.append(result)
        return results


def _by_jax(eqn: Any, given: list[Any]) -> list[Any]:
    """The results of an operation on arrays."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions: Any = ()
    if isinstance(params, tuple):  # of some versions of JAX
        functions, params = params
    found = eqn.primitive.bind(*functions, *given, **params)
    return found if eqn.primitive.multiple_results else [found]


def _is_ours(x: Any) -> bool:
    return isinstance(x, _View) or x.dtype == object


def _check_integers(eqn: Any) -> None:
    """Refuse what wraps: nodes hold integers of 64 bits."""
    name = eqn.primitive.name
    given = [x.aval.dtype for x in eqn.invars]
    to = eqn.outvars[0].aval.dtype
    if name == "convert_element_type":
        if _wraps(to) and not np.can_cast(given[0], to):
            _refuse(
                eqn, f"a conversion to {to}, which wraps",
                "convert to jnp.int32, and write x % 256 or the like",
            )  # fmt: skip
        given = [x for x in given if x.kind == "u" and x.itemsize > 2]
    elif to.kind == "b" or name in _CHOOSE:
        given = [x for x in given if x.kind == "u"]
    for dtype in filter(_wraps, given):
        _refuse(
            eqn, f"{name} of {dtype}, which wraps",
            "convert it first: x.astype(jnp.int32)",
        )  # fmt: skip


def _wraps(dtype: np.dtype) -> bool:
    """Whether it is an integer that is not int32 or int64."""
    return dtype.kind == "u" or (dtype.kind == "i" and dtype.itemsize < 4)


def _moves(x: Any) -> bool:
    """Whether a value may have a derivative."""
    if isinstance(x, np.ndarray) and x.dtype == object:
        return any(
            node.op == "score" or (node.op == "gather" and node.kind == "real")
            for node in nodes.in_order(x.ravel())
        )
    array = x.array if isinstance(x, _View) else x
    return isinstance(array, jax.Array) and jax.numpy.issubdtype(
        array.dtype, jax.numpy.floating
    )


def _refuse(eqn: Any, what: str, cure: str) -> NoReturn:
    """Raise the error of an operation, at the user's line if it is known."""
    found = eqn.source_info.traceback
    for frame in found.frames if found is not None else ():
        if trace.is_users(frame.file_name):
            at = f"{frame.file_name}, line {frame.line_num}"
            trace.refuse(what, cure, at)
    trace.refuse(what, cure)


# ---- Rules ----

_INNER = "jaxpr", "call_jaxpr", "fun_jaxpr"
_LOOPS = "while", "scan"
_SUMS = "reduce_sum", "reduce_prod", "dot_general"
# Results are operands.
_CHOOSE = "max", "min", "clamp", "select_n", "copy", "copy_p", "pvary"
_CURE = (
    "write it with arithmetic, comparisons, jnp.where, exp, log, tanh, sqrt,"
    " sin, cos and the like, or put what it computes into an array of"
    " mod_arrays"
)
_CURES = {
    "while": "write a loop of Python, which is unrolled",
    "scan": "write a loop of Python, which is unrolled",
    "stop_gradient": "all of a score is differentiated: read what is constant"
    " from an array that jax.lax.stop_gradient returned",
    "random_bits": "put random numbers into an array of mod_arrays",
}


def _rule(name: str) -> Callable[..., Node]:
    return lambda params, *args: apply(name, *args)


def _whole(name: Any, inner: Any) -> Any:
    """The operation that a function of JAX's is as a whole."""
    if name == "sinc" and _is_of_jax(inner):
        return _sinc
    known = {"floor_divide": "floor_divide", "remainder": "remainder"}
    avals = [x.aval for x in inner.jaxpr.invars] if name in known else []
    if len(avals) != 2 or any(x.shape for x in avals):
        return None
    dtypes = tuple(x.dtype.name for x in avals)
    weak = tuple(x.weak_type for x in avals)
    if str(inner) != _text_of(name, dtypes, weak):
        return None
    return functools.partial(apply, known[name])


def _is_of_jax(inner: Any) -> bool:
    """Whether JAX's own code was traced, not a function of the same name."""
    file = inner.jaxpr.debug_info.func_filename or ""
    return file.startswith(os.path.join(os.path.dirname(jax.__file__), ""))


@functools.cache
def _text_of(
    name: str, dtypes: tuple[str, ...], weak: tuple[bool, ...]
) -> str:
    """The jaxpr of one of JAX's own functions."""
    made = jax.make_jaxpr(getattr(jax.numpy, name))(*[
        jax.ShapeDtypeStruct((), x, weak_type=y)
        for x, y in zip(dtypes, weak, strict=True)
    ])  # fmt: skip
    return str(made.eqns[0].params.get("jaxpr"))


def _divide(_: Any, a: Node, b: Node) -> Node:
    if a.kind == "real" or b.kind == "real":
        return apply("divide", a, b)
    size = apply("floor_divide", *(apply("absolute", x) for x in (a, b)))
    return apply("multiply", size, apply("multiply", *map(_sign, (a, b))))


def _remainder(_: Any, a: Node, b: Node) -> Node:
    size = apply("remainder", *(apply("absolute", x) for x in (a, b)))
    return apply("multiply", size, _sign(a))


def _sign(x: Node) -> Node:
    return apply("sign", x)


def _whole_power(params: Any, x: Node) -> Node:
    power = params["y"]
    result = x
    for _ in range(abs(power) - 1):
        result = apply("multiply", result, x)
    if power < 0:
        return apply("divide", nodes.constant(1.0), result)
    return result


def _convert(params: Any, x: Node) -> Node:
    kind = np.dtype(params["new_dtype"]).kind
    if kind == "b":
        return converted(x, "bool")
    if kind in "iu":
        return apply("to_int", x) if x.kind == "real" else converted(x, "int")
    return converted(x, "real")


def _select(_: Any, which: Node, *cases: Node) -> Node:
    *others, result = cases
    for i, x in reversed([*enumerate(others)]):
        here = apply("less_equal", converted(which, "int"), nodes.constant(i))
        if which.kind == "bool":
            here = apply("invert", which)
        result = apply("where", here, x, result)
    return result


def _clamp(_: Any, low: Node, x: Node, high: Node) -> Node:
    return apply("minimum", apply("maximum", x, low), high)


def _logistic(_: Any, x: Node) -> Node:
    half = nodes.constant(0.5)
    tanh = apply("tanh", apply("multiply", half, x))
    return apply("add", half, apply("multiply", half, tanh))


def _finite(_: Any, x: Node) -> Node:
    either = apply("bitwise_or", apply("isnan", x), apply("isinf", x))
    return apply("invert", either)


def _round(params: Any, x: Node) -> Node:
    method = jax.lax.RoundingMethod(params["rounding_method"])
    if method is jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return apply("rint", x)
    up = apply("add", apply("absolute", x), nodes.constant(0.5))
    return apply("multiply", _sign(x), apply("floor", up))


def _relu(x: Node) -> Node:
    """Of slope 0 at 0."""
    zero = nodes.constant(0.0)
    return apply("where", apply("less_equal", x, zero), zero, x)


def _relu6(x: Node) -> Node:
    """Of slope 0 at 0 and 6."""
    six = nodes.constant(6.0)
    return apply("where", apply("greater_equal", x, six), six, _relu(x))


def _logaddexp(a: Node, b: Node) -> Node:
    """max(a, b) + log(1 + exp(-|a - b|)), whose slopes at a = b are 1/2."""

    def rest(x: Node) -> Node:
        x = apply("minimum", x, nodes.constant(0.0))
        return apply("log1p", apply("exp", x))

    offset = apply("subtract", a, b)
    found = apply(
        "where",
        apply("less_equal", offset, nodes.constant(0.0)),
        apply("add", b, rest(offset)),
        apply("add", a, rest(apply("negative", offset))),
    )
    # Of two equal infinities, and of NaN.
    return apply("where", apply("isnan", offset), apply("add", a, b), found)


def _sinc(x: Node) -> Node:
    """sin(p) / p for p = pi x; 0 at infinities, as in JAX 0.11.

    Where |p| < 1, 9 terms of its series, which have all derivatives: the
    next is p^18 / 19!, below 1e-17.
    """
    x = converted(x, "real")
    p = apply("multiply", x, nodes.constant(math.pi))
    square = apply("multiply", p, p)
    near = nodes.constant(1.0 / math.factorial(17))
    for i in range(7, -1, -1):
        term = nodes.constant((-1.0) ** i / math.factorial(2 * i + 1))
        near = apply("add", apply("multiply", near, square), term)
    is_near = apply("less", square, nodes.constant(1.0))
    other = apply("where", is_near, nodes.constant(1.0), p)
    is_infinite = apply(
        "equal", apply("absolute", x), nodes.constant(math.inf)
    )
    top = apply("where", is_infinite, nodes.constant(0.0), other)
    far = apply("divide", apply("sin", top), other)
    return apply("where", is_near, near, far)


# Functions of JAX's that have their own derivative, and rules that have it.
_OWN_DERIVATIVES: dict[str, Callable[..., Node]] = {
    "relu": _relu, "relu6": _relu6, "logaddexp": _logaddexp,
}  # fmt: skip


_SAME = {
    "add": "add", "add_any": "add", "sub": "subtract", "mul": "multiply",
    "max": "maximum", "min": "minimum", "pow": "power", "neg": "negative",
    "abs": "absolute", "sign": "sign", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "not": "invert",
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "eq": "equal", "ne": "not_equal", "shift_left": "left_shift",
    "shift_right_arithmetic": "right_shift",
    **{x: x for x in ("exp", "exp2", "expm1", "log", "log1p", "tanh", "sqrt",
                      "sin", "cos", "floor", "ceil", "erf", "erfc")},
    "atan": "arctan",
}  # fmt: skip
_EACH: dict[str, Callable[..., Node]] = {
    **{x: _rule(y) for x, y in _SAME.items()},
    "div": _divide,
    "rem": _remainder,
    "integer_pow": _whole_power,
    "square": lambda _, x: apply("multiply", x, x),
    "rsqrt": lambda _, x: apply(
        "divide", nodes.constant(1.0), apply("sqrt", x)
    ),
    "convert_element_type": _convert,
    "select_n": _select,
    "clamp": _clamp,
    "logistic": _logistic,
    "is_finite": _finite,
    "round": _round,
    "copy": lambda _, x: x,
    "copy_p": lambda _, x: x,
    "pvary": lambda _, x: x,  # in shard_map: a device's own number
    "optimization_barrier": lambda _, x: x,
}


def _reduced(name: str) -> Callable[..., np.ndarray]:
    def rule(params: Any, x: np.ndarray) -> np.ndarray:
        axes = params["axes"]
        kept = [i for i in range(x.ndim) if i not in axes]
        shape = [x.shape[i] for i in kept]
        rows = np.transpose(x, (*kept, *axes)).reshape(*shape, -1)
        found = np.empty(shape, object)
        for at in np.ndindex(*shape):
            found[at] = functools.reduce(
                functools.partial(apply, name), rows[at]
            )
        return found

    return rule


def _product(params: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """dot_general, without batch axes."""
    (of_a, of_b), batch = params["dimension_numbers"]
    if any(batch):
        trace.refuse("a product of matrices in a batch", "write sums")
    rows, columns = (
        np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
        for x, axes in ((a, of_a), (b, of_b))
    )
    shape = (
        *rows.shape[: a.ndim - len(of_a)],
        *columns.shape[: b.ndim - len(of_b)],
    )
    found = np.empty(shape, object)
    for at in np.ndindex(*shape):
        x = rows[at[: a.ndim - len(of_a)]].ravel()
        y = columns[at[a.ndim - len(of_a) :]].ravel()
        terms = itertools.starmap(
            functools.partial(apply, "multiply"), zip(x, y, strict=True)
        )
        found[at] = functools.reduce(functools.partial(apply, "add"), terms)
    return found


def _broadcast(params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, length in zip(
        params["broadcast_dimensions"], x.shape, strict=True
    ):
        shape[axis] = length
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _part(params: Any, x: np.ndarray) -> np.ndarray:
    steps = params["strides"] or [1] * x.ndim
    bounds = zip(
        params["start_indices"], params["limit_indices"], steps, strict=True
    )
    return x[tuple(itertools.starmap(slice, bounds))]


_SHAPES: dict[str, Callable[..., np.ndarray]] = {
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, tuple(p["dimensions"])),
    "reshape": lambda p, x, *_: x.reshape(p["new_sizes"]),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "rev": lambda p, x: np.flip(x, tuple(p["dimensions"])),
    "concatenate": lambda p, *x: np.concatenate(x, p["dimension"]),
    "stack": lambda p, *x: np.stack(x, p["axis"]),
    "slice": _part,
    "dot_general": _product,
    **{
        f"reduce_{x}": _reduced(y)
        for x, y in {
            "sum": "add", "prod": "multiply", "max": "maximum",
            "min": "minimum", "and": "bitwise_and", "or": "bitwise_or",
        }.items()
    },
}  # fmt: skip
