"""The table of options: masks, score modifications, dropout, packing.

`TABLE` has a row for each option of `cuflash.forward` and `cuflash.backward`.
Validation, the kernels' compile-time constants and the argument structs are
derived from it. Tests compare signatures, docstrings and README.md with it
(tests/unit/test_option_table.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request import checks, layouts
from cuflash.request import softcap as softcaps
from cuflash.request.problem import Layout, Problem, Signature


@dataclass(frozen=True)
class Array:
    """The dtypes and shapes that an array option accepts.

    Attributes
    ----------
    dtypes : tuple of str
        Names; ``"q"`` and ``"lse"`` stand for the dtypes of q and lse.
    why : str
        The reason for these dtypes, for messages.
    axes : tuple of str
        Fields of `Sizes`. If empty, the array has one axis of any length.
    words : str
        The axes, for messages.
    broadcasts : bool
        Whether axes may be 1 or left out. If False, only the first of
        several axes, batch, may be left out.
    integers : bool
        Whether other integer dtypes are accepted, and converted.
    by_sequence : bool
        Whether packed sequences take the place of batch: the axis has their
        number, and may be left out too.
    """

    dtypes: tuple[str, ...]
    why: str
    axes: tuple[str, ...]
    words: str
    broadcasts: bool = False
    integers: bool = False
    by_sequence: bool = False


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes
    ----------
    name : str
        The name of the argument of `cuflash.backward` and, unless
        `of_gradients`, of `cuflash.forward`.
    array : Array or None
        The accepted arrays, for an array option. The argument structs have a
        pointer with the option's name.
    check : callable or None
        (name, value) to the checked value, for any other option.
    default : object
        The argument's default, which means that the option is absent.
    nothing : object
        The checked value that means that the option is absent.
    part_of : str
        Its name in `Problem.options`, which two options may share. If empty,
        the problem's field with the option's name tells.
    acts : str
        What it does, for decisions that several options share: ``"tiles"``,
        hide whole tiles of pairs; ``"pairs"``, hide pairs alone; ``"bends"``,
        map scores; ``"adds"``, move them; ``"drops"`` weights; ``"rows"``,
        act on each row as a whole.
    flag : str
        The kernel constant that is true if a call has the option.
    stride : str
        The field of `OptionNumbers` that holds an array's strides.
    numbers : callable or None
        Maps a signature to further fields of `OptionNumbers`, which calls
        without the option fill in too.
    needs : tuple of str
        Other options that it requires: ValueRangeError without them.
    not_with : tuple of str
        Other options that exclude it: UnsupportedError.
    no_order : tuple of str
        Families in which key tiles cannot add to dq in a fixed order with
        it: with ``deterministic=True`` they sum integers, in any order.
    of_gradients : bool
        Whether only `cuflash.backward` has it.
    moves : bool
        Whether the array has tangents and a gradient.
    with_caches : bool
        Whether `cuflash.forward_kvcache` has it too.
    hint : str
        The type of the argument, for signatures; an array option's is that
        of the call's arrays.
    """

    name: str
    array: Array | None = None
    check: Callable[[str, Any], Any] | None = None
    default: Any = None
    nothing: Any = None
    part_of: str = ""
    acts: str = ""
    flag: str = ""
    stride: str = ""
    numbers: Callable[[Signature], dict[str, Any]] | None = None
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    no_order: tuple[str, ...] = ()
    of_gradients: bool = False
    moves: bool = False
    with_caches: bool = False
    hint: str = ""

    def is_in(self, problem: Problem) -> bool:
        """Whether a problem has the option."""
        if self.part_of:
            return self.part_of in problem.options
        return bool(getattr(problem, self.name))


# Fields of OptionNumbers --------------------------------------------------


def _window(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    left, right = p.window
    if p.causal:
        right = 0
    return {
        "window_left": p.seqlen_k if left is None else left,
        "window_right": p.seqlen_q if right is None else right,
    }


def _softcap(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    terms = softcaps.terms(p.scale, p.softcap)
    poly3 = softcaps.poly3_terms(p.scale, p.softcap, p.dtype, p.dropout)
    names = (
        "poly4_terms", "poly4_terms_log2", "poly4_most", "poly4_inverse_log2",
        "poly3_terms_log2", "poly3_most", "poly3_lowest",
    )  # fmt: skip
    values = zip(names, (*terms, *poly3), strict=True)
    return {"softcap": p.softcap, **dict(values)}


def _dropout(signature: Signature) -> dict[str, Any]:
    dropped = signature.problem.dropout
    return {
        "keep_factor": 1.0 / (1.0 - dropped),
        "drop_below": int(dropped * 2.0**32),
    }


def _sequences(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    return {
        "num_sequences": p.num_sequences or 0,
        "total_q": p.seqlen_q,
        "total_k": p.seqlen_k,
    }


def _longest_q(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    longest = p.seqlen_q if p.max_seqlen_q is None else p.max_seqlen_q
    return {"max_seqlen_q": longest}


def _longest_k(signature: Signature) -> dict[str, Any]:
    p = signature.problem
    longest = p.seqlen_k if p.max_seqlen_k is None else p.max_seqlen_k
    return {"max_seqlen_k": longest}


def _dbias(signature: Signature) -> dict[str, Any]:
    return {"dbias_stride": layouts.sum_strides(signature.bias_shape)}


# The table ----------------------------------------------------------------

_PAIRS = ("batch", "num_heads_q", "seqlen_q", "seqlen_k")
_IN_PAIRS = "(batch, heads, seqlen_q, seqlen_k)"


def _indices(axes: tuple[str, ...], words: str) -> Array:
    why = "kernels count in 32-bit integers"
    return Array(("int32",), why, axes, words, integers=True)


TABLE = (
    Option(
        "window",
        check=checks.window,
        nothing=(None, None),
        part_of="window",
        acts="tiles",
        flag="WINDOW",
        numbers=_window,
        with_caches=True,
        hint="tuple[int | None, int | None] | None",
    ),
    Option(
        "softcap",
        check=checks.softcap,
        nothing=0.0,
        part_of="softcap",
        acts="bends",
        flag="SOFTCAP",
        numbers=_softcap,
        with_caches=True,
        hint="float | None",
    ),
    Option(
        "alibi_slopes",
        Array(
            ("float32", "lse"),
            "slopes are float32, or float64 with float64 arrays",
            ("batch", "num_heads_q"),
            "(batch, heads)",
            by_sequence=True,
        ),
        part_of="alibi_slopes",
        acts="adds",
        flag="ALIBI",
        stride="alibi_stride",
        with_caches=True,
    ),
    Option(
        "bias",
        Array(
            ("q", "lse"),
            "it is added to scores",
            _PAIRS,
            _IN_PAIRS,
            broadcasts=True,
        ),
        part_of="bias",
        acts="adds",
        flag="BIAS",
        stride="bias_stride",
        not_with=("cu_seqlens_q",),
        moves=True,
    ),
    Option(
        "mask",
        Array(
            ("bool",),
            "True keeps a pair; pass an additive mask as bias",
            _PAIRS,
            _IN_PAIRS,
            broadcasts=True,
        ),
        part_of="mask",
        acts="pairs",
        flag="HAS_MASK",
        stride="mask_stride",
        not_with=("cu_seqlens_q",),
    ),
    Option(
        "sink",
        Array(
            ("lse",), "it is a logit, as lse is", ("num_heads_q",), "(heads,)"
        ),
        part_of="sink",
        acts="rows",
        flag="SINK",
        stride="sink_stride",
        with_caches=True,
        moves=True,
    ),
    Option(
        "segment_ids_q",
        _indices(("batch", "seqlen_q"), "(batch, seqlen)"),
        part_of="segment_ids",
        acts="tiles",
        flag="SEGMENTS",
        stride="ids_q_stride",
        needs=("segment_ids_k",),
        not_with=("cu_seqlens_q",),
        no_order=("sm90",),
    ),
    Option(
        "segment_ids_k",
        _indices(("batch", "seqlen_k"), "(batch, seqlen)"),
        part_of="segment_ids",
        acts="tiles",
        stride="ids_k_stride",
        needs=("segment_ids_q",),
        not_with=("cu_seqlens_q",),
        no_order=("sm90",),
    ),
    Option(
        "dropout",
        check=checks.dropout,
        default=0.0,
        nothing=0.0,
        part_of="dropout",
        acts="drops",
        flag="DROPOUT",
        numbers=_dropout,
        hint="float",
    ),
    Option("seed", check=checks.seed, hint="int | None"),
    Option(
        "cu_seqlens_q",
        _indices((), "(sequences + 1,)"),
        part_of="cu_seqlens",
        acts="tiles",
        flag="PACKED",
        stride="offset_q_stride",
        numbers=_sequences,
        needs=("cu_seqlens_k",),
        no_order=("sm90",),
    ),
    Option(
        "cu_seqlens_k",
        _indices((), "(sequences + 1,)"),
        part_of="cu_seqlens",
        acts="tiles",
        stride="offset_k_stride",
        needs=("cu_seqlens_q",),
        no_order=("sm90",),
    ),
    Option(
        "max_seqlen_q",
        check=checks.length,
        numbers=_longest_q,
        needs=("cu_seqlens_q",),
        hint="int | None",
    ),
    Option(
        "max_seqlen_k",
        check=checks.length,
        numbers=_longest_k,
        needs=("cu_seqlens_k",),
        hint="int | None",
    ),
    Option(
        "return_dbias",
        check=checks.flag,
        default=False,
        nothing=False,
        flag="DBIAS",
        numbers=_dbias,
        needs=("bias",),
        of_gradients=True,
        hint="bool",
    ),
    Option(
        "return_dsink",
        check=checks.flag,
        default=False,
        nothing=False,
        needs=("sink",),
        of_gradients=True,
        hint="bool",
    ),
)

BY_NAME = {option.name: option for option in TABLE}
ARRAYS = tuple(option.name for option in TABLE if option.array)

# What has tangents and gradients, in the order of `Problem.tangents`.
MOVED = ("q", "k", "v", *(x.name for x in TABLE if x.moves))

# The options of calls: of `forward` and what it gives `jvp` and others, of
# `backward`, of `forward_kvcache`.
FORWARD = tuple(x.name for x in TABLE if not x.of_gradients)
BACKWARD = tuple(BY_NAME)
KVCACHE = tuple(x.name for x in TABLE if x.with_caches)


# Derived from the table ---------------------------------------------------


def passed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call that differ from their defaults."""
    others, arrays = split(given)
    return others | arrays


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that differ from their defaults: what is no array, and arrays.

    The arrays are in the table's order.
    """
    others: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        option = BY_NAME[name]
        default = option.default
        if option.array:
            arrays[name] = value
        elif type(value) is not type(default) or value != default:
            others[name] = value
    if len(arrays) > 1:
        arrays = {x: arrays[x] for x in ARRAYS if x in arrays}
    return others, arrays


_ACTS = {option.part_of: option.acts for option in TABLE if option.acts}


def acts(problem: Problem) -> frozenset[str]:
    """What the options of a problem do; see `Option`."""
    return frozenset(_ACTS[name] for name in problem.options)


def flags(problem: Problem) -> tuple[tuple[str, bool], ...]:
    """The kernel constants that say which options a problem has."""
    large = softcaps.is_large(problem.softcap, problem.dtype)
    return (
        *((row.flag, row.is_in(problem)) for row in TABLE if row.flag),
        ("LARGE_SOFTCAP", large),
    )


def as_read(signature: Signature) -> dict[str, Layout]:
    """The layouts in which kernels read the array options of a call.

    Indices are int32; slopes have the dtype of lse.
    """
    slopes = np.dtype(signature.problem.lse_dtype)
    dtypes: dict[str, np.dtype] = dict.fromkeys(INDICES, np.dtype(np.int32))
    dtypes["alibi_slopes"] = slopes
    return {
        name: layouts.by_element(x, dtypes.get(name))
        for name, x in signature.options.items()
    }


def numbers(
    signature: Signature, taken: Mapping[str, Layout]
) -> dict[str, Any]:
    """The fields of `OptionNumbers`; fields left out are 0.

    Parameters
    ----------
    signature : Signature
    taken : mapping of str to Layout
        The layouts of the array options as kernels read them.
    """
    fields: dict[str, Any] = {}
    for option in TABLE:
        if option.name in taken:
            strides = layouts.element_strides(taken[option.name])
            fields[option.stride] = strides if len(strides) > 1 else strides[0]
        if option.numbers:
            fields |= option.numbers(signature)
    return fields


@functools.cache
def _without_order(family: str) -> frozenset[str]:
    return frozenset(
        option.part_of for option in TABLE if family in option.no_order
    )


def has_order(problem: Problem, family: str) -> bool:
    """Whether a family can sum dq in a fixed order with these options."""
    return _without_order(family).isdisjoint(problem.options)


def check_order(problem: Problem) -> None:
    """Raise UnsupportedError if dbias cannot be summed in a fixed order."""
    wanted = problem.return_dbias and problem.deterministic
    if wanted and problem.bias_is_broadcast:
        name = "dbias" if problem.direction == "backward" else "d2bias"
        raise UnsupportedError(
            f"deterministic and return_{name} are both True and bias is"
            " broadcast, expected one of them False or a bias of the full"
            " shape: a GPU sums the gradient of a broadcast bias in no fixed"
            " order"
        )


# Numbers -----------------------------------------------------------------

Numbers = tuple[tuple[str, Any], ...]  # (name, value), hashable


def numbers_of(given: Mapping[str, Any]) -> tuple[Numbers, int]:
    """Check the options that are not arrays; return the seed separately.

    Parameters
    ----------
    given : mapping of str to object
        All options that the user passed.

    Returns
    -------
    numbers : tuple of (str, object)
        The options that are present, as fields of `Problem`.
    seed : int
    """
    # return_dbias=False does not require bias. NumPy's False comes here too:
    # it is not the default object.
    gradients = {
        option.name: option.check(option.name, given[option.name])
        for option in TABLE
        if option.of_gradients and option.check and option.name in given
    }
    _check_partners({n: x for n, x in given.items() if gradients.get(n, True)})
    scalars = {}
    for option in TABLE:
        if option.check and option.name in given:
            value = option.check(option.name, given[option.name])
            if value != option.nothing:
                scalars[option.name] = value
    seed = scalars.pop("seed", None)
    if seed is None and "dropout" in scalars:
        raise ValueRangeError(
            "seed is None, expected an int because dropout is given: forward "
            "and backward must drop the same pairs"
        )
    return tuple(scalars.items()), seed or 0


def _check_partners(given: Mapping[str, Any]) -> None:
    """Check the options that require or exclude one another."""
    for name in given:
        for needed in BY_NAME[name].needs:
            if needed not in given:
                raise ValueRangeError(
                    f"{name} is given without {needed}, expected {needed} "
                    "too: neither has an effect alone"
                )
    for name in given:
        for other in BY_NAME[name].not_with:
            if other in given:
                raise UnsupportedError(
                    f"{name} is given with {other}, expected one of "
                    "them: packed sequences do not support bias, mask or "
                    "segment ids"
                )


# Arrays ------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes and dtypes that determine the shapes of array options.

    num_sequences is None unless sequences are packed.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    rank: int
    dtype: str
    lse_dtype: str
    num_sequences: int | None = None


def check(seen: tuple[tuple, ...], sizes: Sizes) -> dict[str, Layout]:
    """Check option arrays and return their layouts in full rank.

    Full rank is (batch, heads, seqlen_q, seqlen_k) for bias and mask,
    (batch, heads) for alibi_slopes, (sequences, heads) if sequences are
    packed, and (batch, seqlen) for segment ids, with stride 0 along axes that
    the user left out; sink is (heads,) and cu_seqlens (sequences + 1,).

    Parameters
    ----------
    seen : tuple of (name, shape, strides, dtype, offset, device)
    sizes : Sizes
    """
    for name, shape, *_ in seen:
        if name == "cu_seqlens_q":
            (ends,) = _full_shape(name, tuple(shape), sizes)
            sizes = replace(sizes, num_sequences=ends - 1)
    layouts = {}
    for name, shape, strides, dtype, offset, _ in seen:
        full = check_array(name, tuple(shape), dtype, sizes)
        strides = broadcast_strides(tuple(shape), tuple(strides), full)
        layouts[name] = Layout(full, strides, dtype, offset)
    if "cu_seqlens_q" in layouts:
        _check_packed(layouts, sizes)
    return layouts


def check_array(
    name: str, shape: tuple[int, ...], dtype: Any, sizes: Sizes
) -> tuple[int, ...]:
    """Check the dtype and the shape of an option array.

    Returns
    -------
    tuple of int
        Its full shape; see `check`.
    """
    _check_dtype(name, np.dtype(dtype), sizes)
    return _full_shape(name, shape, sizes)


def _check_dtype(name: str, got: np.dtype, sizes: Sizes) -> None:
    rule = _rule(name)
    if rule.integers:
        check_integers(name, got)
        return
    own = {"q": sizes.dtype, "lse": sizes.lse_dtype}
    expected = dict.fromkeys(own.get(x, x) for x in rule.dtypes)
    if got.name not in expected:
        raise DTypeError(
            f"{name} has dtype {got.name}, expected {' or '.join(expected)}: "
            f"{rule.why}{_cure_of_dtype(name, got)}"
        )


def _cure_of_dtype(name: str, got: np.dtype) -> str:
    if name == "bias" and got.kind == "b":
        return "; pass a boolean array as mask"
    if name == "mask" and got.kind in "iu":
        return f"; or pass {name} != 0"
    return "; convert it" if got.kind == "f" and name != "mask" else ""


def check_integers(name: str, dtype: Any) -> None:
    """Raise DTypeError unless an array holds integers."""
    got = np.dtype(dtype)
    if got.kind not in "iu":
        raise DTypeError(
            f"{name} has dtype {got.name}, expected an integer dtype: "
            f"convert {name} to int32"
        )


# Arrays of integers, of all calls.
INDICES = frozenset(
    (
        *(x.name for x in TABLE if x.array and x.array.integers),
        "cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad",
        "positions",
    )
)  # fmt: skip


def _rule(name: str) -> Array:
    rule = BY_NAME[name].array
    assert rule is not None
    return rule


def _full_shape(
    name: str, shape: tuple[int, ...], sizes: Sizes
) -> tuple[int, ...]:
    rule = _rule(name)
    full = tuple(getattr(sizes, axis) for axis in rule.axes)
    words, where = rule.words, "q"
    if rule.by_sequence and sizes.num_sequences is not None:
        full = (sizes.num_sequences, *full[1:])
        words = words.replace("batch", "sequences")
        where = "q and cu_seqlens_q"
    if rule.broadcasts:
        return _expect_broadcast(name, shape, full)
    if full:
        others = (full[1:],) if len(full) > 1 else ()
        where += f" (layout is {words})"
        return _expect(name, shape, full, others, where)
    if len(shape) != 1 or shape[0] < 1:
        raise ShapeError(
            f"{name} has shape {shape}, expected {rule.words}: it holds "
            "the offset of each sequence's first token, then the end of the "
            "last"
        )
    return shape


def _expect(
    name: str,
    shape: tuple[int, ...],
    full: tuple[int, ...],
    others: tuple[tuple[int, ...], ...],
    where: str,
) -> tuple[int, ...]:
    if shape != full and shape not in others:
        known = " or ".join(map(str, (full, *others)))
        raise ShapeError(
            f"{name} has shape {shape}, expected {known} as in {where}"
        )
    return full


def _expect_broadcast(
    name: str, shape: tuple[int, ...], full: tuple[int, ...]
) -> tuple[int, ...]:
    if not broadcasts(shape, full):
        advice = ""
        if len(full) == 4 and shape == (full[0], full[3]):
            advice = f"; if it tells of keys, pass {name}[:, None, None]"
        elif len(full) == 4 and shape == (full[0], *full[2:]):
            advice = f"; if it is the same for all heads, pass {name}[:, None]"
        raise ShapeError(
            f"{name} has shape {shape}, expected one that broadcasts to "
            f"{full} (layout is {_rule(name).words}{advice})"
        )
    return full


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of a shape can be broadcast to the full shape."""
    return len(shape) <= len(full) and all(
        got in (1, size)
        for got, size in zip(shape[::-1], full[::-1], strict=False)
    )


def broadcast_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], full: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides for the full shape: 0 along axes of length 1 or left out."""
    missing = len(full) - len(shape)
    kept = (
        0 if size == 1 != wide else stride
        for size, stride, wide in zip(
            shape, strides, full[missing:], strict=True
        )
    )
    return (0,) * missing + tuple(kept)


def _check_packed(layouts: dict[str, Layout], sizes: Sizes) -> None:
    if sizes.rank != 3:
        raise ShapeError(
            f"q has {sizes.rank} axes, expected 3 as cu_seqlens_q is given "
            "(layout is (total_q, heads, head_dim)): of batch 1, pass q[0], "
            "k[0] and v[0]"
        )
    q, k = (layouts[f"cu_seqlens_{x}"].shape for x in "qk")
    if q != k:
        raise ShapeError(
            f"cu_seqlens_k has shape {k}, expected {q} as cu_seqlens_q: "
            "each sequence has queries and keys"
        )
