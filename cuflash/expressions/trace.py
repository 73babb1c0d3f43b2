"""Records a user's function: calls it once, with symbols for its arguments.

Operators, NumPy's functions and PyTorch's on symbols make nodes. What cannot
be recorded raises an `ExpressionError` that names the user's line.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import numpy as np

from cuflash.errors import CuflashError, ExpressionError, in_words
from cuflash.expressions import nodes
from cuflash.expressions.functions import (
    BY_UFUNC,
    LOGICAL,
    apply,
    converted,
)
from cuflash.expressions.nodes import INDICES, LENGTHS, SCORE, Kind, Node
from cuflash.expressions.ranges import fits_int32
from cuflash.expressions.remember import Same, fingerprint

# A graph of more nodes is a loop that its author did not mean to unroll.
MOST_NODES = 2000

# Files of these folders are never the user's: this package's, NumPy's.
_OURS_AND_THEIRS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[1], Path(np.__file__).parent)
)
_LIBRARIES = "torch", "jax", "cupy"  # nor theirs, where they are imported
_POSITIONAL = {
    "score_mod": ("score", *INDICES),
    "mask_mod": INDICES,
}


@dataclass(frozen=True)
class ArrayKind:
    """An array of `mod_arrays` as a text is made for it.

    Attributes
    ----------
    dtype : str
    ndim : int
    unit : tuple of int
        The axes along which its elements are neighbours.
    """

    dtype: str
    ndim: int
    unit: tuple[int, ...] = ()


@dataclass(frozen=True)
class Given:
    """What `mod_arrays` holds, by name: kinds of arrays and of numbers.

    Slots count in the order of these tuples.
    """

    arrays: tuple[tuple[str, ArrayKind], ...] = ()
    numbers: tuple[tuple[str, Kind], ...] = ()


# ---- Errors ----


def is_users(file: str) -> bool:
    """Whether code of that file is the user's; typed text is, as <stdin>."""
    if file.startswith(("<__array_function__", "<frozen ")):
        return False
    for library in map(sys.modules.get, _LIBRARIES):
        own = getattr(library, "__file__", None)
        if own and file.startswith(f"{Path(own).parent}{os.sep}"):
            return False
    return not file.startswith(_OURS_AND_THEIRS)


def _place() -> str:
    """The user's file and line, by the first frame that is not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{file}, line {frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


def refuse(what: str, cure: str, at: str = "") -> NoReturn:
    """Raise the error of something that cannot be recorded."""
    raise ExpressionError(f"{at or _place()}: {what}: {cure}")


_IF = (
    "`if`, `and`, `or`, `not`, `while`, min() and max() need one truth"
    " value, a traced value stands for those of all pairs",
    "write np.where(condition, a, b), (a < b) & (c < d), |, ~, np.minimum or"
    " np.maximum",
)


# ---- Symbols ----


class Several:
    """What holds several traced values, along axes (rows.py)."""

    __slots__ = ()


class Symbol:
    """A traced value: a score, an index, a number, or what follows."""

    __slots__ = ("node",)
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"<traced {self.node.kind}: {self.node!r}>"

    # NumPy's, PyTorch's and CuPy's functions.

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **keywords: Any
    ) -> Symbol:
        name = ufunc.__name__
        if method != "__call__" or keywords:
            words = method if method != "__call__" else ", ".join(keywords)
            refuse(
                f"np.{name} with {words} cannot be recorded",
                f"write np.{name}(a, b)" if ufunc.nin > 1
                else f"write np.{name}(a)",
            )  # fmt: skip
        return _called(f"np.{name}", name, inputs)

    def __array_function__(
        self, function: Any, types: Any, args: Any, keywords: Any
    ) -> Symbol:
        return _called_with(f"np.{function.__name__}", args, keywords)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Symbol:
        if any(isinstance(x, Several) for x in args):
            return NotImplemented
        name = function.__name__.strip("_")
        told = {
            x: y for x, y in (kwargs or {}).items()
            if not (y is None or y is False)
        }  # fmt: skip
        if name == "unsqueeze":
            return args[0].unsqueeze(*args[1:], **told)
        if name in ("max", "min"):  # of two values, else along an axis
            if len(args) != 2 or not all(map(_stands_for_one, args)):
                refuse(
                    f"torch.{name} but of two traced values",
                    f"write torch.{name}imum(a, b)",
                )
            name = f"{name}imum"
        return _called_with(f"torch.{name}", args, told)

    # Python's.

    def __bool__(self) -> bool:
        refuse(*_IF)

    def __index__(self) -> int:
        refuse(
            "a traced value is an index of something that is not in"
            " mod_arrays, or the bound of a loop",
            "pass the array by mod_arrays and name it among the function's"
            " keyword arguments: def f(..., *, table)",
        )

    def __int__(self) -> int:
        refuse("int() of a traced value", "write x.astype(int)")

    def __float__(self) -> float:
        refuse(
            "float() or a function of math of a traced value",
            "write x.astype(float), or NumPy's function: np.exp(x)",
        )

    def __iter__(self) -> Any:
        refuse("a loop over a traced value", "it stands for one number")

    def __len__(self) -> int:
        refuse("len() of a traced value", "it stands for one number")

    def __getitem__(self, key: Any) -> Any:
        refuse("an index of a traced number", "only arrays have elements")

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Symbol:
        """The value as a bool, an int (truncated) or a real."""
        return Symbol(_as_dtype(self.node, dtype))

    def to(self, *args: Any, **named: Any) -> Symbol:
        """As `astype`; a device changes nothing."""
        told = [*args[:2], named.get("dtype"), named.get("other")]
        for x in told:
            if isinstance(x, Symbol):
                return self.astype(x.dtype)
            # A bool is PyTorch's non_blocking.
            if not (_is_device(x) or isinstance(x, bool)):
                return self.astype(x)
        return self

    def int(self) -> Symbol:
        """PyTorch's: as ``astype(numpy.int32)``."""
        return self.astype("int32")

    def float(self) -> Symbol:
        """As ``astype(float)``."""
        return Symbol(converted(self.node, "real"))

    def __abs__(self) -> Symbol:
        return _called("abs", "absolute", (self,))

    def __neg__(self) -> Symbol:
        return _called("-", "negative", (self,))

    def __pos__(self) -> Symbol:
        return self

    def __invert__(self) -> Symbol:
        return _called("~", "invert", (self,))

    def __floor__(self) -> Symbol:
        return _called("math.floor", "floor", (self,)).astype(int)

    def __ceil__(self) -> Symbol:
        return _called("math.ceil", "ceil", (self,)).astype(int)

    def __trunc__(self) -> Symbol:
        return self.astype(int)

    def __round__(self, digits: Any = None) -> Symbol:
        if digits is not None:
            refuse("round() to digits", "write np.rint(x * 100) / 100")
        return _called("round", "rint", (self,)).astype(int)

    # PyTorch's methods.

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(
                f"a traced value has no attribute {name!r}", name=name
            )
        return functools.partial(_method, name, self)

    @property
    def dtype(self) -> str:
        """Its kind: what `astype` takes."""
        return self.node.kind

    @property
    def device(self) -> None:
        """None, where PyTorch's functions take it for the default."""

    def new_zeros(self, *_: Any, **named: Any) -> Symbol:
        """The number 0, of a dtype."""
        return self._new(0, named)

    def new_ones(self, *_: Any, **named: Any) -> Symbol:
        """The number 1, of a dtype."""
        return self._new(1, named)

    def new_full(self, _: Any, value: Any, **named: Any) -> Symbol:
        """A number, of a dtype."""
        return self._new(value, named)

    def new_tensor(self, value: Any, **named: Any) -> Symbol:
        """A number, of a dtype."""
        return self._new(value, named)

    def _new(self, value: Any, named: Mapping[str, Any]) -> Symbol:
        dtype = named.get("dtype")
        dtype = self.dtype if dtype is None else dtype
        return Symbol(_as_dtype(node_of(value, "a new value"), dtype))


def _operator(symbol: str, name: str) -> tuple[Any, Any]:
    def forward(self: Symbol, other: Any) -> Any:
        if isinstance(other, Several):
            return NotImplemented
        return _called(symbol, name, (self, other))

    def reflected(self: Symbol, other: Any) -> Any:
        if isinstance(other, Several):
            return NotImplemented
        return _called(symbol, name, (other, self))

    return forward, reflected


_OPERATORS = (
    ("+", "add", "add"), ("-", "sub", "subtract"), ("*", "mul", "multiply"),
    ("/", "truediv", "divide"), ("//", "floordiv", "floor_divide"),
    ("%", "mod", "remainder"), ("**", "pow", "power"),
    ("&", "and", "bitwise_and"), ("|", "or", "bitwise_or"),
    ("^", "xor", "bitwise_xor"), ("<<", "lshift", "left_shift"),
    (">>", "rshift", "right_shift"), ("<", "lt", "less"),
    ("<=", "le", "less_equal"), (">", "gt", "greater"),
    (">=", "ge", "greater_equal"), ("==", "eq", "equal"),
    ("!=", "ne", "not_equal"),
)  # fmt: skip
OPERATORS = tuple(x for _, x, _ in _OPERATORS)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
for _symbol, _short, _name in _OPERATORS:
    _forward, _reflected = _operator(_symbol, _name)
    setattr(Symbol, f"__{_short}__", _forward)
    if _short not in _COMPARISONS:  # Python mirrors those itself
        setattr(Symbol, f"__r{_short}__", _reflected)


class ArraySymbol:
    """An array of `mod_arrays`: to be indexed by ints."""

    __slots__ = ("kind", "name", "slot")

    def __init__(self, name: str, slot: int, kind: ArrayKind) -> None:
        self.name, self.slot, self.kind = name, slot, kind

    def __repr__(self) -> str:
        return f"<mod_arrays[{self.name!r}]>"

    @property
    def ndim(self) -> int:
        return self.kind.ndim

    @property
    def shape(self) -> tuple[Symbol, ...]:
        """Its sizes, which may differ from call to call."""
        axes = range(self.kind.ndim)
        make = nodes.make
        return tuple(
            Symbol(make("size", "int", (), (self.slot, x))) for x in axes
        )

    def __getitem__(self, key: Any) -> Symbol:
        key = key if isinstance(key, tuple) else (key,)
        if len(key) != self.kind.ndim:
            refuse(
                f"mod_arrays[{self.name!r}] has {self.kind.ndim} axes and is"
                f" read by {len(key)} indices",
                f"give each axis one: {self.name}["
                + ", ".join(["i"] * self.kind.ndim)
                + "]",
            )
        return self._gather(tuple(self._index(x) for x in key))

    def _gather(self, indices: tuple[Node, ...]) -> Symbol:
        dtype = np.dtype(self.kind.dtype)
        kind: Kind = "real"
        if dtype.kind in "biu":
            kind = "bool" if dtype.kind == "b" else "int"
        read = (self.slot, self.kind.dtype)
        found = _limited(nodes.make("gather", kind, indices, read))
        if _NOW.reads is not None:
            _NOW.reads.setdefault(found.node, _place())
        return found

    def _index(self, given: Any) -> Node:
        if isinstance(given, (slice, type(None), type(...))):
            refuse(
                f"mod_arrays[{self.name!r}] is read by a slice",
                "read one element: every index is an int or a traced int",
            )
        node = node_of(given, f"the index of {self.name}")
        if node.kind == "real":
            refuse(
                f"an index of mod_arrays[{self.name!r}] is a float",
                "write np.floor(x).astype(int)",
            )
        return converted(node, "int")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse(
            f"a store into mod_arrays[{self.name!r}]",
            "a score_mod or mask_mod only reads",
        )

    def _used(self, *_: Any, **__: Any) -> NoReturn:
        refuse(
            f"mod_arrays[{self.name!r}] is used as a number",
            f"read an element of it: {self.name}[...]",
        )


ArraySymbol.__array_ufunc__ = ArraySymbol._used  # type: ignore[attr-defined]
for _short in (
    "array_function",
    *(x for _, x, _ in _OPERATORS),
    *(f"r{x}" for _, x, _ in _OPERATORS if x not in _COMPARISONS),
    *("neg", "abs", "invert", "bool", "len", "iter", "float", "int"),
):
    setattr(ArraySymbol, f"__{_short}__", ArraySymbol._used)
ArraySymbol.__hash__ = None  # type: ignore[assignment]


def _stands_for_one(value: Any) -> bool:
    """Whether an operand of PyTorch's `max` or `min` is one number."""
    return isinstance(value, Symbol) or getattr(value, "ndim", None) == 0


def node_of(value: Any, what: str) -> Node:
    """The node of an operand."""
    # NumPy's scalars pass themselves on as arrays of no axes in comparisons;
    # so does np.array of a symbol.
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Symbol):
        return value.node
    if nodes.is_number(value):
        if type(value) is int and not -(2**63) < value < 2**63:
            refuse(f"{what} is {value}", "expected an int of 64 bits")
        return nodes.constant(value)
    if isinstance(value, ArraySymbol):
        value._used()
    if _NOW.captured is not None:
        found = _NOW.captured(value)
        if found is not None:
            return found.node
    if getattr(value, "ndim", None) == 0:  # its number may be on a device
        refuse(
            f"{what} is an array without axes",
            "write its number, x.item(), or pass that by mod_arrays",
        )
    if getattr(value, "ndim", None) is not None:
        refuse(
            f"{what} is an array that is not in mod_arrays",
            "pass it by mod_arrays, and name it among the function's keyword"
            " arguments: def f(..., *, table)",
        )
    refuse(
        f"{what} is {in_words(value)}",
        "expected a traced value or a number",
    )


def _name_of_dtype(dtype: Any) -> str:
    """NumPy's name of a dtype, which may be Python's, PyTorch's or JAX's."""
    own = str(dtype).rpartition(".")[2]
    for given in (dtype, own):
        with contextlib.suppress(TypeError):
            return np.dtype(given).name
    return "float" if "float" in own else own


def _as_dtype(node: Node, dtype: Any) -> Node:
    """A node as a dtype's kind, if its values are the same there.

    Ints have 64 bits, so those of fewer would not wrap as they do elsewhere.
    Indices of PyTorch and JAX have 32: what 32 bits do not hold is wrapped,
    and not what follows.
    """
    name = _name_of_dtype(dtype)
    if name.startswith(("complex", "object", "str", "datetime")):
        refuse(f"a conversion to {name}", "write x.astype(int) or float")
    if name.startswith("bool"):
        return _as_kind(node, "bool")
    if not name.startswith(("int", "uint", "long")):
        return _as_kind(node, "real")
    narrow = name.startswith("uint") or name in ("int8", "int16")
    if narrow and node.kind != "bool":
        refuse(
            f"a conversion to {name}, which wraps, where ints have 64 bits",
            "write x.astype(int), and x % 256 or the like to wrap",
        )
    whole = _as_kind(node, "int")
    if name == "int32" and node.kind == "int" and not fits_int32(whole):
        bits = nodes.constant(32)
        whole = apply("right_shift", apply("left_shift", whole, bits), bits)
    return whole


def _is_device(value: Any) -> bool:
    """Whether PyTorch's `to` gets no dtype."""
    if isinstance(value, str):
        return value.partition(":")[0] in ("cpu", "cuda")
    return value is None or type(value).__name__ == "device"


def _as_kind(node: Node, kind: Kind) -> Node:
    if kind == "int" and node.kind == "real":
        return apply("to_int", node)
    return converted(node, kind)


class _Recording(threading.local):
    """Of the function that a thread records.

    Attributes
    ----------
    nodes : int
        How many operations it has recorded.
    reads : dict of Node to str, or None
        Where it reads arrays; None: nobody asks.
    captured : callable or None
        Makes symbols of arrays that are not in `mod_arrays` (`capturing`).
    """

    nodes = 0
    reads: dict[Node, str] | None = None
    captured: Callable[[Any], Symbol | None] | None = None


_NOW = _Recording()


@contextlib.contextmanager
def capturing(captured: Callable[[Any], Symbol | None]) -> Iterator[None]:
    """Take arrays that a function gets from outside as operands.

    Parameters
    ----------
    captured : callable
        The symbol of an array without axes; None of what it is not for.
    """
    before, _NOW.captured = _NOW.captured, captured
    try:
        yield
    finally:
        _NOW.captured = before


def _limited(node: Node) -> Symbol:
    """The symbol of a new node, if there are not too many."""
    _NOW.nodes += 1
    if _NOW.nodes > MOST_NODES:
        refuse(
            f"the function computes more than {MOST_NODES} values a pair",
            "put what a loop or a recursion computes into an array of"
            " mod_arrays, and read it by index",
        )
    return Symbol(node)


def _called(words: str, name: str, args: tuple[Any, ...]) -> Symbol:
    """A function of symbols and numbers, by NumPy's or PyTorch's name."""
    operands = [node_of(x, f"an operand of {words}") for x in args]
    if name in LOGICAL:
        operands = [converted(x, "bool") for x in operands]
        name = LOGICAL[name]
    elif name in ("square", "reciprocal", "deg2rad"):
        x = operands[0]
        if name == "square":
            return _limited(apply("multiply", x, x))
        factor = nodes.constant(1.0 if name == "reciprocal" else np.pi / 180)
        operation = "divide" if name == "reciprocal" else "multiply"
        return _limited(apply(operation, factor, x))
    elif name in _COMPOSED and len(operands) == 1:
        return _limited(_composed(name, operands[0]))
    elif (name, len(operands)) in _OF_SEVERAL:
        return _limited(_OF_SEVERAL[name, len(operands)](*operands))
    elif name not in BY_UFUNC:
        _refuse_unknown(words)
    row = BY_UFUNC[name]
    name = row.name
    if len(operands) != row.operands:
        refuse(
            f"{words} of {len(operands)} values",
            f"expected {row.operands}",
        )
    _check_kinds(words, name, operands)
    if name in _TO_WHOLE and operands[0].kind != "real":
        return Symbol(converted(operands[0], "int"))
    if name == "power":
        return _limited(_power(words, *operands))
    return _limited(apply(name, *operands))


def _refuse_unknown(words: str) -> NoReturn:
    refuse(
        f"{words} cannot be recorded",
        "expressions know +, -, *, /, //, %, **, comparisons, &, |, ~,"
        " << and >>, and of NumPy's and SciPy's functions "
        + ", ".join(sorted({x.name for x in BY_UFUNC.values()} - _OURS)),
    )


_OURS = {"to_int", "to_real", "product_if"}
_TO_WHOLE = "floor", "ceil", "trunc", "rint"
_BITWISE = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift",
    "right_shift",
)  # fmt: skip


def _check_kinds(words: str, name: str, operands: list[Node]) -> None:
    if name in _BITWISE and any(x.kind == "real" for x in operands):
        refuse(
            f"{words} of a float",
            "compare first, with parentheses: (a >= b) & (c < d)",
        )


_COMPOSED = (
    "relu", "rsqrt", "sigmoid", "silu", "softplus", "log_sigmoid",
    "logsigmoid",
)  # fmt: skip


def _composed(name: str, x: Node) -> Node:
    if name == "relu":
        return apply("maximum", x, nodes.constant(0))
    one, half = nodes.constant(1.0), nodes.constant(0.5)
    if name == "rsqrt":
        return apply("divide", one, apply("sqrt", x))
    if name in ("log_sigmoid", "logsigmoid"):
        return apply("negative", _softplus(apply("negative", x)))
    if name == "softplus":
        return _softplus(x)
    tanh = apply("tanh", apply("multiply", half, x))
    sigmoid = apply("add", half, apply("multiply", half, tanh))
    return apply("multiply", x, sigmoid) if name == "silu" else sigmoid


def _softplus(x: Node) -> Node:
    """log(1 + exp(x)), of which no exponential overflows."""
    below = apply("less_equal", x, nodes.constant(0.0))
    size = apply("where", below, x, apply("negative", x))
    rest = apply("log1p", apply("exp", size))
    return apply("where", below, rest, apply("add", x, rest))


def _fmod(x: Node, y: Node) -> Node:
    """The remainder with the sign of x; exact, as is that of sizes."""
    size = apply("remainder", apply("absolute", x), apply("absolute", y))
    below = apply("less", x, nodes.constant(0))
    return apply("where", below, apply("negative", size), size)


def _logaddexp(a: Node, b: Node) -> Node:
    """log(exp(a) + exp(b)); of equal ones, even infinite, both have slopes."""
    a, b = converted(a, "real"), converted(b, "real")
    half = nodes.constant(0.5)
    mean = apply("add", apply("multiply", half, a), apply("multiply", half, b))
    of_equal = apply("add", mean, nodes.constant(math.log(2)))
    apart = apply("absolute", apply("subtract", a, b))
    rest = apply("log1p", apply("exp", apply("negative", apart)))
    largest = apply("add", apply("maximum", a, b), rest)
    return apply("where", apply("equal", a, b), of_equal, largest)


def _lerp(a: Node, b: Node, weight: Node) -> Node:
    """a + weight (b - a), counted from the nearer end."""
    a, b, weight = (converted(x, "real") for x in (a, b, weight))
    length = apply("subtract", b, a)
    rest = apply("subtract", nodes.constant(1.0), weight)
    return apply(
        "where",
        apply("less", apply("absolute", weight), nodes.constant(0.5)),
        apply("add", a, apply("multiply", weight, length)),
        apply("subtract", b, apply("multiply", rest, length)),
    )


# By NumPy's and PyTorch's name and how many operands it has.
_OF_SEVERAL: dict[tuple[str, int], Callable[..., Node]] = {
    ("fmod", 2): _fmod, ("logaddexp", 2): _logaddexp, ("lerp", 3): _lerp,
}  # fmt: skip


def _gelu(x: Any, approximate: str = "none") -> Any:
    """PyTorch's: x / 2 erfc(-x / sqrt(2)), or the same by tanh."""
    half = 0.5 * x
    if approximate == "none":
        operand = (-math.sqrt(0.5) * x,)
        return half * _called("torch.gelu", "erfc", operand)
    if approximate != "tanh":
        refuse(
            f"torch.gelu with approximate={approximate!r}",
            'write approximate="none" or "tanh"',
        )
    operand = (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x),)
    return half + half * _called("torch.gelu", "tanh", operand)


def _power(words: str, x: Node, exponent: Node) -> Node:
    """A power; by a small whole constant, products."""
    small = exponent.is_constant and exponent.value in (0, 1, 2, 3, 4)
    if small and exponent.kind == "real":
        x = converted(x, "real")
    if small:
        result = nodes.constant(1) if x.kind != "real" else nodes.constant(1.0)
        for _ in range(int(exponent.value)):
            result = apply("multiply", result, x)
        return result
    if x.kind != "real" and exponent.kind != "real":
        refuse(
            f"{words} of two ints",
            "write x.astype(float) ** y, or 1 << y for powers of two",
        )
    return apply("power", x, exponent)


def _called_with(words: str, args: Any, keywords: Mapping[str, Any]) -> Symbol:
    """A function that is no ufunc: where, clip, and others by their name."""
    name = words.rpartition(".")[2].strip("_")
    if name in ("clip", "clamp") and keywords.keys() <= _BOUNDS.keys():
        return _clip(*args, **{_BOUNDS[x]: y for x, y in keywords.items()})
    if name == "div" and keywords.get("rounding_mode") == "floor":
        return _called(words, "floor_divide", tuple(args))
    if name == "masked_fill" and len(args) == 3:
        return _called_with("torch.where", (args[1], args[2], args[0]), {})
    if name == "gelu" and keywords.keys() <= {"approximate"}:
        return _gelu(*args, **keywords)
    if keywords and name not in METHODS.union(_COMPOSED, _FILLED, ("rsub",)):
        _refuse_unknown(words)
    if keywords:
        refuse(
            f"{words} with {', '.join(keywords)} cannot be recorded",
            _INSTEAD.get(next(iter(keywords)), f"write {words} without it"),
        )
    if name == "where" and len(args) != 3:
        refuse("np.where of a condition alone", "write np.where(c, a, b)")
    if name in ("to", "type", "astype") and len(args) == 2:
        return args[0].astype(args[1])
    if name in _FILLED:
        return args[0]._new(*args[1:] or (_FILLED[name],), {})
    reflected = {"rsub": "subtract", "rdiv": "divide", "rtruediv": "divide"}
    if name in reflected:
        return _called(words, reflected[name], tuple(args)[::-1])
    return _called(words, _METHODS.get(name, name), tuple(args))


_METHODS = {
    "radd": "add", "rmul": "multiply", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "clamp_min": "maximum",
    "clamp_max": "minimum",
}  # fmt: skip
_FILLED = {"zeros_like": 0, "ones_like": 1, "full_like": 0}
_BOUNDS = {"a_min": "low", "min": "low", "a_max": "high", "max": "high"}
# For keywords of PyTorch's functions.
_INSTEAD = {
    "rounding_mode": "write a // b, which rounds down",
    "alpha": "write a + alpha * b",
}


def _method(name: str, x: Symbol, *args: Any, **keywords: Any) -> Symbol:
    """A function called as a method of its first operand."""
    kind = _CONVERSIONS.get(name)
    if kind is not None:
        return x.astype(kind)
    if name == "where" and len(args) == 2:  # of x, where the condition holds
        return _called_with("x.where", (args[0], x, args[1]), keywords)
    return _called_with(f"x.{name}", (x, *args), keywords)


_CONVERSIONS = {
    "bool": "bool", "long": "int", "short": "int16", "char": "int8",
    "byte": "uint8", "double": "float", "half": "float", "bfloat16": "float",
}  # fmt: skip
METHODS = frozenset(
    (
        *BY_UFUNC, *LOGICAL, *_METHODS, *_CONVERSIONS,
        *("clip", "clamp", "square", "reciprocal", "relu", "rsqrt"),
        *("masked_fill", "div", "sigmoid", "where", "type", "to", "astype"),
        *("int", "float", *(name for name, _ in _OF_SEVERAL)),
    )
)  # fmt: skip


def _clip(x: Any, low: Any = None, high: Any = None) -> Symbol:
    if low is not None:
        x = _called("np.clip", "maximum", (x, low))
    if high is not None:
        x = _called("np.clip", "minimum", (x, high))
    return x


# ---- Recording ----


def record(
    function: Callable[..., Any], role: str, given: Given
) -> tuple[Node, frozenset[str]]:
    """The graph of a user's function, and the names that it has.

    Parameters
    ----------
    function : callable
    role : {"score_mod", "mask_mod"}
    given : Given

    Raises
    ------
    ExpressionError
        If the function cannot be recorded. The message names its line.
    """
    at = _where(function, role)
    keywords = _keywords(function, role, given, at)
    _check_code(function, at)
    arguments = [
        Symbol(SCORE if name == "score" else nodes.index(name))
        for name in _POSITIONAL[role]
    ]
    _NOW.nodes = 0
    try:
        result = function(*arguments, **keywords)
    except CuflashError:
        raise
    except RecursionError as error:
        raise ExpressionError(
            f"{at}: it calls itself without end: a condition on a traced"
            " value never ends a recursion"
        ) from error
    except Exception as error:
        raise ExpressionError(_of_failure(error, at)) from error
    return _result(result, role, at), frozenset(keywords)


def with_numbers(
    function: Callable[..., Any], whole: set[str]
) -> Callable[..., Any]:
    """A function that gets arrays without axes as numbers."""
    if not whole:
        return function

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for name in whole.intersection(named):
            named[name] = named[name][0]
        return function(*args, **named)

    return call


def result(node: Node, role: str, function: Any) -> Node:
    """A graph that was made without symbols, of the role's kind."""
    return _result(Symbol(node), role, _where(function, role))


def place_of(error: Exception) -> str | None:
    """The user's line that raised; None if there is none."""
    place, trace = None, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            place = f"{file}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _of_failure(error: Exception, at: str) -> str:
    """What a function raised, and where; NumPy hides what a symbol says."""
    place = place_of(error) or at
    advice = ""
    if str(Symbol) in str(error):  # a library's words for what it got
        return (
            f"{place}: a function of another library got a traced value:"
            " write NumPy's of its name, such as np.where(condition, a, b)"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
    if isinstance(error, (IndexError, TypeError)):
        advice = (
            ": if it reads an array, pass it by mod_arrays and name it among"
            " the function's keyword arguments: def f(..., *, table)"
        )
    if isinstance(error, AttributeError):
        advice = ": write NumPy's function, np.exp(x), or x.astype(int)"
    return f"{place}: {type(error).__name__}: {error}{advice}"


def _where(function: Any, role: str) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(code, CodeType):
        return f"{role} {name!r}"
    return f"{role} {name!r} ({code.co_filename}, line {code.co_firstlineno})"


def _keywords(
    function: Any, role: str, given: Given, at: str
) -> dict[str, Any]:
    """The keyword arguments of a function, as symbols."""
    words = ", ".join(_POSITIONAL[role])
    count = len(_POSITIONAL[role])
    if hasattr(function, "shape"):
        other = "mask" if role == "mask_mod" else "bias"
        raise ExpressionError(
            f"{role} is an array ({in_words(function)}), expected a function"
            f" of ({words}, *, ...): pass an array of pairs as {other}"
        )
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError) as error:
        raise ExpressionError(
            f"{at}: its arguments are unknown, expected a Python function of"
            f" ({words}, *, ...)"
        ) from error
    positional = [x for x in parameters if x.kind in _BY_PLACE]
    required = [x for x in positional if x.default is x.empty]
    takes_any = any(x.kind == x.VAR_POSITIONAL for x in parameters)
    few = len(positional) < count and not takes_any
    if few or len(required) > count:
        raise ExpressionError(
            f"{at}: it takes {len(required)} positional arguments, expected"
            f" {count}: ({words}); name arrays after them: ({words}, *,"
            " table)"
        )
    found: dict[str, Any] = {}
    known = _symbols(given)
    for x in parameters:
        if x.kind == x.VAR_KEYWORD:
            found |= {y: known[y] for y in _names(given) if y not in found}
        elif x.kind == x.KEYWORD_ONLY:
            if x.name in known:
                found[x.name] = known[x.name]
            elif x.default is x.empty:
                names = ", ".join(_names(given)) or "nothing"
                raise ExpressionError(
                    f"{at}: its argument {x.name!r} is not in mod_arrays,"
                    f" which has {names}; seqlen_q and seqlen_k are known too"
                )
    return found


_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
)  # fmt: skip


def _names(given: Given) -> list[str]:
    return [name for name, _ in (*given.arrays, *given.numbers)]


def _symbols(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {x: Symbol(nodes.index(x)) for x in LENGTHS}
    for slot, (name, kind) in enumerate(given.arrays):
        found[name] = ArraySymbol(name, slot, kind)
    for slot, (name, number) in enumerate(given.numbers):
        found[name] = Symbol(nodes.make("number", number, (), slot))
    return found


def _result(result: Any, role: str, at: str) -> Node:
    wanted = "a score" if role == "score_mod" else "a bool"
    if result is None:
        raise ExpressionError(
            f"{at}: it returns None, expected {wanted}: is `return` missing?"
        )
    if isinstance(result, (np.generic, np.ndarray)) and result.ndim == 0:
        result = result.item()
    if isinstance(result, Several):
        raise ExpressionError(
            f"{at}: it returns several values, expected {wanted}: read one of"
            " them, x[0], or write x.sum(-1), x.any(-1)"
        )
    if not isinstance(result, Symbol) and not nodes.is_number(result):
        raise ExpressionError(
            f"{at}: its result is {in_words(result)}, expected {wanted} made"
            " of its arguments"
        )
    node = node_of(result, "the result")
    if role == "mask_mod":
        if node.kind != "bool":
            raise ExpressionError(
                f"{at}: it returns a traced {node.kind}, expected a bool,"
                " True where the pair is visible: compare, as in q_idx >="
                " kv_idx"
            )
        return node
    if node.kind == "bool":
        raise ExpressionError(
            f"{at}: it returns a bool, expected a score: pass masks as"
            " mask_mod, or write np.where(condition, score, -np.inf)"
        )
    return converted(node, "real")


# ---- What Python does without telling a symbol ----


def _check_code(function: Any, at: str) -> None:
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        for line, what, cure in _faults(code):
            refuse(what, cure, f"{at}, at line {line}" if line else at)


_FAULTS: dict[CodeType, list[tuple[int | None, str, str]]] = {}


def _faults(code: CodeType) -> list[tuple[int | None, str, str]]:
    """Lines that compare with ``is`` or change what lies outside."""
    if code not in _FAULTS:
        _FAULTS[code] = [*_faults_within(code, frozenset(code.co_freevars))]
    return _FAULTS[code]


def _faults_within(
    code: CodeType, outside: frozenset[str]
) -> Iterator[tuple[int | None, str, str]]:
    """Those of a code; `outside` is named what the function did not make."""
    line: int | None = None
    last = ""
    for x in dis.get_instructions(code):
        here = getattr(x, "line_number", None) or x.starts_line
        if here and here is not True:
            line = here
        if x.opname == "IS_OP" and last != "LOAD_CONST":
            yield (
                line, "it compares with `is`, which tells nothing of a traced"
                " value", "write == or !=",
            )  # fmt: skip
        if x.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR") or (
            x.opname in ("STORE_DEREF", "DELETE_DEREF") and x.argval in outside
        ):
            yield (
                line, f"it stores {x.argval!r}, which lies outside",
                "it is called once, not once a pair: return what you compute",
            )  # fmt: skip
        last = x.opname
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            own = frozenset(inner.co_freevars) & outside
            yield from _faults_within(inner, own)


# ---- Remembering ----


def place_of_read(function: Any, role: str, given: Given, gather: Node) -> str:
    """The file and line of a recorded function that read an array."""
    _NOW.reads = {}
    try:
        record(function, role, given)
        return _NOW.reads.get(gather, _where(function, role))
    finally:
        _NOW.reads = None


_RECORDED: dict[Any, tuple[Node, frozenset[str]]] = {}
_MOST_RECORDED = 4096


def recorded(
    function: Any, role: str, given: Given
) -> tuple[Node, frozenset[str]]:
    """As `record`; once, where all that the graph depends on is known."""
    own = fingerprint(function)
    if own is None:
        return record(function, role, given)
    # `given` by its identity, which callers remember: the key holds it.
    key = own, role, Same(given)
    found = _RECORDED.get(key)
    if found is None:
        found = record(function, role, given)
        if len(_RECORDED) >= _MOST_RECORDED:
            _RECORDED.clear()
        _RECORDED[key] = found
    return found
