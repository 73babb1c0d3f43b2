"""Checks of what a call may ask for besides scale: masks and score steps.

`validate` alone calls these: numbers first (`numbers_of`), then arrays
against the call's own (`check`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
)
from .problem import Layout

ARRAYS = (
    "alibi_slopes",
    "bias",
    "mask",
    "sink",
    "segment_ids_q",
    "segment_ids_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
)

# float32 scores divided by it, and multiplied again, stay what they are.
SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-30, 1e30

_TOGETHER = (
    ("segment_ids_q", "segment_ids_k"),
    ("cu_seqlens_q", "cu_seqlens_k"),
)
_NOT_PACKED = ("bias", "mask", "segment_ids_q", "segment_ids_k")
_NEEDS = {
    "max_seqlen_q": "cu_seqlens_q",
    "max_seqlen_k": "cu_seqlens_k",
    "return_dbias": "bias",
    "return_dsink": "sink",
}


@dataclass(frozen=True)
class Numbers:
    """The options that are no arrays, checked, but for the seed."""

    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    dropout: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_dbias: bool = False
    return_dsink: bool = False


NO_NUMBERS = Numbers()


# Numbers -----------------------------------------------------------------


def numbers_of(given: Mapping[str, Any]) -> tuple[Numbers, int]:
    """Check the options that are no arrays, and return the seed apart.

    Parameters
    ----------
    given : mapping of str to object
        All options of a call that the user passed.
    """
    flags: dict[str, Any] = {
        name: flag(name, given[name])
        for name in ("return_dbias", "return_dsink")
        if name in given
    }
    # What is not wanted needs no partner: NumPy's False comes here as well.
    _check_partners({n: x for n, x in given.items() if flags.get(n, True)})
    lengths: dict[str, Any] = {
        name: _whole(name, given[name], 0, 2**31 - 1)
        for name in ("max_seqlen_q", "max_seqlen_k")
        if name in given
    }
    found = Numbers(
        window=_window(given.get("window")),
        softcap=_softcap(given.get("softcap")),
        dropout=_dropout(given.get("dropout")),
        **lengths,
        **flags,
    )
    seed = given.get("seed")
    if seed is not None:
        seed = _whole("seed", seed, 0, 2**64 - 1)
    elif found.dropout:
        raise ValueRangeError(
            "seed is None, expected an int as there is dropout: forward and "
            "backward have to drop the same pairs"
        )
    return found, seed or 0


def _check_partners(given: Mapping[str, Any]) -> None:
    """Check that no option comes without another that it needs."""
    pairs = [*_TOGETHER, *(pair[::-1] for pair in _TOGETHER), *_NEEDS.items()]
    for name, needed in pairs:
        if name in given and needed not in given:
            raise ValueRangeError(
                f"{name} is given without {needed}, expected {needed} too: "
                "one says nothing without the other"
            )
    if "cu_seqlens_q" in given:
        for name in _NOT_PACKED:
            if name in given:
                raise UnsupportedError(
                    f"{name} is given with cu_seqlens_q, expected one of "
                    "them: packed sequences have no common axes of queries "
                    "and keys"
                )


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return (None, None)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise DTypeError(
            f"window is {in_words(window)}, expected (left, right), each an "
            "int, or None for no bound"
        )
    for bound in window:
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, numbers.Integral):
            raise DTypeError(
                f"window has a bound {in_words(bound)}, expected an int, or "
                "None for no bound"
            )
        if bound < 0:
            raise ValueRangeError(
                f"window is {tuple(window)}, expected bounds of at least 0, "
                "or None for no bound: a query sees left keys before its own "
                "place, that key, and right keys after it"
            )
    left, right = (None if x is None else int(x) for x in window)
    return left, right


def _softcap(softcap: Any) -> float:
    value = 0.0 if softcap is None else _real("softcap", softcap)
    if value and not SMALLEST_SOFTCAP <= value <= LARGEST_SOFTCAP:
        raise ValueRangeError(
            f"softcap is {softcap}, expected {SMALLEST_SOFTCAP} to "
            f"{LARGEST_SOFTCAP}, or 0 or None for none: scores stay between "
            "-softcap and softcap"
        )
    return value


def _dropout(dropout: Any) -> float:
    value = 0.0 if dropout is None else _real("dropout", dropout)
    if not 0.0 <= value < 1.0:
        raise ValueRangeError(
            f"dropout is {dropout}, expected at least 0 and less than 1: it "
            "is the probability of a pair to be dropped"
        )
    return value


def _real(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise DTypeError(f"{name} is {in_words(x)}, expected a real number")
    try:
        value = float(x)
    except OverflowError:  # an int beyond float64
        value = math.inf
    if not math.isfinite(value):
        raise ValueRangeError(f"{name} is {x}, expected a finite number")
    return value


def _whole(name: str, x: Any, low: int, high: int) -> int:
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise DTypeError(f"{name} is {in_words(x)}, expected an int")
    value = int(x)
    if not low <= value <= high:
        raise ValueRangeError(f"{name} is {value}, expected {low} to {high}")
    return value


def flag(name: str, given: Any) -> bool:
    """Check an argument that is True or False."""
    if not isinstance(given, (bool, np.bool_)):
        raise DTypeError(
            f"{name} is {in_words(given)}, expected True or False"
        )
    return bool(given)


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
    expected, why = {
        "alibi_slopes": (("float32",), "slopes are float32"),
        "bias": (
            tuple(dict.fromkeys((sizes.dtype, sizes.lse_dtype))),
            "it is added to scores",
        ),
        "mask": (("bool",), "True keeps a pair; an additive one is a bias"),
        "sink": ((sizes.lse_dtype,), "it is a logit, as lse is"),
    }.get(name, (("int32",), "kernels count in 32-bit integers"))
    if got not in expected:
        raise DTypeError(
            f"{name} has dtype {got}, expected {' or '.join(expected)}: {why}"
        )


def _full_shape(
    name: str, shape: tuple[int, ...], sizes: Sizes
) -> tuple[int, ...]:
    batch, heads = sizes.batch, sizes.num_heads_q
    full: tuple[int, ...]
    if name == "sink":
        return _expect(name, shape, (heads,), "(heads,)", ())
    if name == "alibi_slopes":
        full = batch, heads
        return _expect(name, shape, full, "(batch, heads)", ((heads,),))
    if name in ("bias", "mask"):
        full = batch, heads, sizes.seqlen_q, sizes.seqlen_k
        return _expect_broadcast(name, shape, full)
    if name.startswith("segment_ids"):
        seqlen = sizes.seqlen_q if name.endswith("q") else sizes.seqlen_k
        full = batch, seqlen
        return _expect(name, shape, full, "(batch, seqlen)", ((seqlen,),))
    if len(shape) != 1 or shape[0] < 1:
        raise ShapeError(
            f"{name} has shape {shape}, expected (sequences + 1,): it holds "
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
            f"{full} (layout is (batch, heads, seqlen_q, seqlen_k))"
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
