"""The table of options: masks, score modifications, dropout, packing.

`TABLE` has a row for each option of `cuflash.forward` and `cuflash.backward`.
Validation, the kernels' compile-time constants and the argument structs are
derived from it. Tests compare signatures, docstrings and README.md with it
(tests/unit/test_option_table.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.errors import UnsupportedError
from cuflash.request import checks, fields, layouts, traced
from cuflash.request import softcap as softcaps
from cuflash.request.option import Array, Option
from cuflash.request.problem import Layout, Problem, Signature

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
        numbers=fields.window,
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
        numbers=fields.softcap,
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
        numbers=fields.dropout,
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
        numbers=fields.sequences,
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
        numbers=fields.longest_q,
        needs=("cu_seqlens_q",),
        hint="int | None",
    ),
    Option(
        "max_seqlen_k",
        check=checks.length,
        numbers=fields.longest_k,
        needs=("cu_seqlens_k",),
        hint="int | None",
    ),
    Option(
        "score_mod",
        part_of="score_mod",
        acts="adds",
        flag="SCORE_MOD",
        with_caches=True,
        traced=True,
        hint="Callable[..., Any] | None",
    ),
    Option(
        "mask_mod",
        part_of="mask_mod",
        acts="tiles",
        flag="MASK_MOD",
        no_order=("sm90",),
        with_caches=True,
        traced=True,
        hint="Callable[..., Any] | None",
    ),
    Option(
        "mod_arrays",
        with_caches=True,
        traced=True,
        hint="Mapping[str, Any] | None",
    ),
    Option(
        "return_dbias",
        check=checks.flag,
        default=False,
        nothing=False,
        flag="DBIAS",
        numbers=fields.dbias,
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
    Option(
        "return_dmod",
        default=(),
        nothing=(),
        flag="DMOD",
        of_gradients=True,
        traced=True,
        hint="tuple[str, ...]",
    ),
)

BY_NAME = {option.name: option for option in TABLE}
ARRAYS = tuple(option.name for option in TABLE if option.array)

# Arrays of integers, of all calls.
INDICES = frozenset(
    (
        *(x.name for x in TABLE if x.array and x.array.integers),
        "cache_seqlens", "page_table", "cache_batch_idx", "cache_leftpad",
        "positions", "queries", "keys", "heads",
    )
)  # fmt: skip

# What has tangents and gradients, in the order of `Problem.tangents`.
DIFFERENTIABLE = tuple(x.name for x in TABLE if x.moves)
MOVED = ("q", "k", "v", *DIFFERENTIABLE)

# The options of calls: of `forward`, of `backward`, of `jvp` and others, of
# `forward_kvcache`.
FORWARD = tuple(x.name for x in TABLE if not x.of_gradients)
BACKWARD = tuple(BY_NAME)
# Of the gradients of readouts: a loss reaches a bias and a sink by lse alone.
READOUT_BACKWARD = *FORWARD, "return_dmod"
UNTRACED = tuple(x for x in FORWARD if not BY_NAME[x].traced)
TRACED = frozenset(x.name for x in TABLE if x.traced)
KVCACHE = tuple(x.name for x in TABLE if x.with_caches)
# A user's functions and what they read.
FUNCTIONS = tuple(x for x in FORWARD if x in TRACED)


# Derived from the table ---------------------------------------------------


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
    if "mod_arrays" in others:
        others["mod_arrays"], read = traced.parted(others["mod_arrays"])
        arrays |= read
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
        ("STORES_DBIAS", stores_dbias(problem)),
    )


def stores_dbias(problem: Problem) -> bool:
    """Whether kernels store a bias's gradient instead of adding to it.

    Each element then has one pair, and kernels visit all pairs.
    """
    return (
        problem.return_dbias
        and problem.direction == "backward"
        and not (problem.bias_is_broadcast or problem.causal)
        and problem.score_mod is None
        and "tiles" not in acts(problem)
    )


def is_as_lse(name: str) -> bool:
    """Whether an option is an array that has lse's dtype and no other."""
    array = BY_NAME[name].array
    return array is not None and array.dtypes == ("lse",)


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
    found: dict[str, Any] = {}
    for option in TABLE:
        if option.name in taken:
            strides = layouts.element_strides(taken[option.name])
            found[option.stride] = strides if len(strides) > 1 else strides[0]
        if option.numbers:
            found |= option.numbers(signature)
    return found


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
