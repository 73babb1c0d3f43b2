"""The one table of options: masks, and what changes scores or weights.

`TABLE` has a row for each option of `cuflash.forward` and `cuflash.backward`.
Validation, the constants that kernels are compiled with and the argument
structs follow from it; signatures, docstrings and README.md are tested
against it (tests/unit/test_option_table.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks, layouts
from . import softcap as softcaps
from .errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from .problem import Layout, Problem, Signature


@dataclass(frozen=True)
class Array:
    """What an option that is an array may be.

    Attributes
    ----------
    dtypes : tuple of str
        Names; ``"q"`` and ``"lse"`` stand for the dtypes of q and lse.
    why : str
        The reason, for messages.
    axes : tuple of str
        Fields of `Sizes`. Without any the array has one axis of any length.
    words : str
        The axes, for messages.
    broadcasts : bool
        Whether axes may be 1 or left out. Otherwise, of several axes the
        first, batch, may be left out.
    """

    dtypes: tuple[str, ...]
    why: str
    axes: tuple[str, ...]
    words: str
    broadcasts: bool = False


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes
    ----------
    name : str
        The argument of `cuflash.forward`, unless `of_gradients`, and of
        `cuflash.backward`.
    array : Array or None
        What it may be, if it is an array. The argument structs have a pointer
        of its name.
    check : callable or None
        (name, value) to the checked value, if it is no array.
    default : object
        The argument's, which asks for nothing.
    nothing : object
        The checked value that asks for nothing.
    part_of : str
        Its name in `Problem.options`, which two options may share; if none
        has it, the option is the problem's field of its name.
    flag : str
        The constant that tells kernels whether a call has it.
    stride : str
        The field of `OptionNumbers` with an array's strides.
    numbers : callable or None
        From a signature to further fields of `OptionNumbers`. Calls without
        the option have them too.
    needs : tuple of str
        Other options without which it means nothing: ValueRangeError.
    not_with : tuple of str
        Other options that cannot be given with it: UnsupportedError.
    no_order : tuple of str
        Families that do not run it with ``deterministic=True``: another
        family does.
    of_gradients : bool
        Whether `cuflash.backward` alone has it.
    """

    name: str
    array: Array | None = None
    check: Callable[[str, Any], Any] | None = None
    default: Any = None
    nothing: Any = None
    part_of: str = ""
    flag: str = ""
    stride: str = ""
    numbers: Callable[[Signature], dict[str, Any]] | None = None
    needs: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()
    no_order: tuple[str, ...] = ()
    of_gradients: bool = False

    def is_in(self, problem: Problem) -> bool:
        """Whether a problem has it."""
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
    slight = softcaps.slight_terms(p.scale, p.softcap, p.dtype, p.dropout)
    names = (
        "cap_terms", "cap_terms_log2", "cap_small", "cap_inverse_log2",
        "cap_slight_terms_log2", "cap_slight", "cap_lowest",
    )  # fmt: skip
    values = zip(names, (*terms, *slight), strict=True)
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
_INDICES = (("int32",), "kernels count in 32-bit integers")

TABLE = (
    Option(
        "window",
        check=checks.window,
        nothing=(None, None),
        part_of="window",
        flag="WINDOW",
        numbers=_window,
    ),
    Option(
        "softcap",
        check=checks.softcap,
        nothing=0.0,
        part_of="softcap",
        flag="SOFTCAP",
        numbers=_softcap,
    ),
    Option(
        "alibi_slopes",
        Array(
            ("float32",),
            "slopes are float32",
            ("batch", "num_heads_q"),
            "(batch, heads)",
        ),
        part_of="alibi_slopes",
        flag="ALIBI",
        stride="alibi_stride",
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
        flag="BIAS",
        stride="bias_stride",
        not_with=("cu_seqlens_q",),
    ),
    Option(
        "mask",
        Array(
            ("bool",),
            "True keeps a pair; an additive one is a bias",
            _PAIRS,
            _IN_PAIRS,
            broadcasts=True,
        ),
        part_of="mask",
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
        flag="SINK",
        stride="sink_stride",
    ),
    Option(
        "segment_ids_q",
        Array(*_INDICES, ("batch", "seqlen_q"), "(batch, seqlen)"),
        part_of="segment_ids",
        flag="SEGMENTS",
        stride="ids_q_stride",
        needs=("segment_ids_k",),
        not_with=("cu_seqlens_q",),
        no_order=("wgmma",),
    ),
    Option(
        "segment_ids_k",
        Array(*_INDICES, ("batch", "seqlen_k"), "(batch, seqlen)"),
        part_of="segment_ids",
        stride="ids_k_stride",
        needs=("segment_ids_q",),
        not_with=("cu_seqlens_q",),
        no_order=("wgmma",),
    ),
    Option(
        "dropout",
        check=checks.dropout,
        default=0.0,
        nothing=0.0,
        part_of="dropout",
        flag="DROPOUT",
        numbers=_dropout,
    ),
    Option("seed", check=checks.seed),
    Option(
        "cu_seqlens_q",
        Array(*_INDICES, (), "(sequences + 1,)"),
        part_of="cu_seqlens",
        flag="PACKED",
        stride="offset_q_stride",
        numbers=_sequences,
        needs=("cu_seqlens_k",),
        no_order=("wgmma",),
    ),
    Option(
        "cu_seqlens_k",
        Array(*_INDICES, (), "(sequences + 1,)"),
        part_of="cu_seqlens",
        stride="offset_k_stride",
        needs=("cu_seqlens_q",),
        no_order=("wgmma",),
    ),
    Option(
        "max_seqlen_q",
        check=checks.length,
        numbers=_longest_q,
        needs=("cu_seqlens_q",),
    ),
    Option(
        "max_seqlen_k",
        check=checks.length,
        numbers=_longest_k,
        needs=("cu_seqlens_k",),
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
    ),
    Option(
        "return_dsink",
        check=checks.flag,
        default=False,
        nothing=False,
        needs=("sink",),
        of_gradients=True,
    ),
)

ARRAYS = tuple(option.name for option in TABLE if option.array)
_BY_NAME = {option.name: option for option in TABLE}


# What follows from the table ----------------------------------------------


def passed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a call's arguments that are not left at default."""
    found = {}
    for name, value in given.items():
        default = _BY_NAME[name].default
        same = type(value) is type(default) and value == default
        if value is not None and not same:
            found[name] = value
    return found


def flags(problem: Problem) -> tuple[tuple[str, bool], ...]:
    """The constants that tell kernels which options a problem has."""
    return tuple(
        (option.flag, option.is_in(problem)) for option in TABLE if option.flag
    )


def numbers(
    signature: Signature, taken: Mapping[str, Layout]
) -> dict[str, Any]:
    """The fields of `OptionNumbers`; those left out are 0.

    Parameters
    ----------
    signature : Signature
    taken : mapping of str to Layout
        The options that are arrays, as kernels read them.
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
    """Raise UnsupportedError if a gradient has no fixed order of sums."""
    wanted = problem.return_dbias and problem.deterministic
    if wanted and problem.bias_is_broadcast:
        raise UnsupportedError(
            "deterministic and return_dbias are both True and bias is"
            " broadcast, expected one of them False or a bias of the full"
            " shape: what is broadcast has its gradient summed in no fixed"
            " order on a GPU"
        )


# Numbers -----------------------------------------------------------------

Numbers = tuple[tuple[str, Any], ...]  # (name, value): they can be hashed


def numbers_of(given: Mapping[str, Any]) -> tuple[Numbers, int]:
    """Check the options that are no arrays, and return the seed apart.

    Parameters
    ----------
    given : mapping of str to object
        All options of a call that the user passed.

    Returns
    -------
    numbers : tuple of (str, object)
        Those that ask for something, as `Problem` has them.
    seed : int
    """
    # A gradient that is not wanted needs no partner. NumPy's False, which is
    # not the default itself, comes here as well.
    gradients = {
        option.name: option.check(option.name, given[option.name])
        for option in TABLE
        if option.of_gradients and option.check and option.name in given
    }
    _check_partners({n: x for n, x in given.items() if gradients.get(n, True)})
    found = {}
    for option in TABLE:
        if option.check and option.name in given:
            value = option.check(option.name, given[option.name])
            if value != option.nothing:
                found[option.name] = value
    seed = found.pop("seed", None)
    if seed is None and "dropout" in found:
        raise ValueRangeError(
            "seed is None, expected an int as there is dropout: forward and "
            "backward have to drop the same pairs"
        )
    return tuple(found.items()), seed or 0


def _check_partners(given: Mapping[str, Any]) -> None:
    """Check that no option comes without another that it needs."""
    for name in given:
        for needed in _BY_NAME[name].needs:
            if needed not in given:
                raise ValueRangeError(
                    f"{name} is given without {needed}, expected {needed} "
                    "too: one says nothing without the other"
                )
    for name in given:
        for other in _BY_NAME[name].not_with:
            if other in given:
                raise UnsupportedError(
                    f"{name} is given with {other}, expected one of "
                    "them: packed sequences have no common axes of queries "
                    "and keys"
                )


# Arrays ------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What the shapes of options follow from."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    rank: int
    dtype: str
    lse_dtype: str


def check(seen: tuple[tuple, ...], sizes: Sizes) -> dict[str, Layout]:
    """Check option arrays, and return their layouts in full rank.

    bias and mask are (batch, heads, seqlen_q, seqlen_k) there, alibi_slopes
    (batch, heads), segment ids (batch, seqlen), with strides of 0 along axes
    that the user left out; sink is (heads,), cu_seqlens (sequences + 1,).

    Parameters
    ----------
    seen : tuple of (name, shape, strides, dtype, offset, device)
    sizes : Sizes
    """
    layouts = {}
    for name, shape, strides, dtype, offset, _ in seen:
        _check_dtype(name, np.dtype(dtype).name, sizes)
        full = _full_shape(name, tuple(shape), sizes)
        strides = _broadcast(tuple(shape), tuple(strides), full)
        layouts[name] = Layout(full, strides, dtype, offset)
    if "cu_seqlens_q" in layouts:
        _check_packed(layouts, sizes)
    return layouts


def _check_dtype(name: str, got: str, sizes: Sizes) -> None:
    rule = _rule(name)
    own = {"q": sizes.dtype, "lse": sizes.lse_dtype}
    expected = dict.fromkeys(own.get(x, x) for x in rule.dtypes)
    if got not in expected:
        raise DTypeError(
            f"{name} has dtype {got}, expected {' or '.join(expected)}: "
            f"{rule.why}"
        )


def _rule(name: str) -> Array:
    rule = _BY_NAME[name].array
    assert rule is not None
    return rule


def _full_shape(
    name: str, shape: tuple[int, ...], sizes: Sizes
) -> tuple[int, ...]:
    rule = _rule(name)
    full = tuple(getattr(sizes, axis) for axis in rule.axes)
    if rule.broadcasts:
        return _expect_broadcast(name, shape, full)
    if full:
        others = (full[1:],) if len(full) > 1 else ()
        return _expect(name, shape, full, rule.words, others)
    if len(shape) != 1 or shape[0] < 1:
        raise ShapeError(
            f"{name} has shape {shape}, expected {rule.words}: it holds "
            "the offset of each sequence's first token, and the end of the "
            "last"
        )
    return shape


def _expect(
    name: str,
    shape: tuple[int, ...],
    full: tuple[int, ...],
    words: str,
    others: tuple[tuple[int, ...], ...],
) -> tuple[int, ...]:
    if shape != full and shape not in others:
        known = " or ".join(map(str, (full, *others)))
        raise ShapeError(
            f"{name} has shape {shape}, expected {known} as in q (layout is "
            f"{words})"
        )
    return full


def _expect_broadcast(
    name: str, shape: tuple[int, ...], full: tuple[int, ...]
) -> tuple[int, ...]:
    fits = len(shape) <= 4 and all(
        got in (1, size)
        for got, size in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{name} has shape {shape}, expected one that broadcasts to "
            f"{full} (layout is {_rule(name).words})"
        )
    return full


def _broadcast(
    shape: tuple[int, ...], strides: tuple[int, ...], full: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides of the full shape: 0 along axes that were 1 or left out."""
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
            "(layout is (total_q, heads, head_dim))"
        )
    q, k = (layouts[f"cu_seqlens_{x}"].shape for x in "qk")
    if q != k:
        raise ShapeError(
            f"cu_seqlens_k has shape {k}, expected {q} as cu_seqlens_q: "
            "each sequence has queries and keys"
        )
