"""The arrays of options: dtypes, and shapes in full rank.

`cuflash.request.options` has what each option accepts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ShapeError
from cuflash.request.layouts import broadcasts
from cuflash.request.options import BY_NAME, Array
from cuflash.request.problem import Layout
from cuflash.request.validate.descriptions import layout_of
from cuflash.request.validate.shapes import check_integers


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
    for one in seen:
        name, shape, _, dtype, *_ = one
        full = check_array(name, tuple(shape), dtype, sizes)
        layouts[name] = layout_of(one, full)
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
