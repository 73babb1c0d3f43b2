"""Shapes, ranks and dtypes of the arrays of a call."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.errors import DTypeError, ShapeError, UnsupportedError
from cuflash.request.problem import Layout, Problem, like_lse

DTYPES = ("float16", "bfloat16", "float32", "float64")

# Of q and k, and of v: 64 rows of 512 sums fill the registers of 256 threads.
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512

# Kernels count tokens, heads and batches in int32 and round lengths up to
# whole tiles. No tile has more than 1024 tokens.
MAX_LENGTH = 2**31 - 1 - 1024

# Keeps position + length + window bound within int32, where the position may
# be past the end as above.
MAX_LENGTH_OF_OPTIONS = 2**30 - 1 - 1024

AXES = ("batch", "seqlen", "heads", "head_dim")
AXES_LSE = ("batch", "heads", "seqlen")
_LAYOUTS = {
    4: "(batch, seqlen, heads, head_dim)",
    3: "(seqlen, heads, head_dim)",
    2: "(seqlen, head_dim)",
}
_LAYOUTS_LSE = {
    4: "(batch, heads, seqlen)",
    3: "(heads, seqlen)",
    2: "(seqlen,)",
}


class Arrays:
    """A call's arrays without their data, and the checks on them.

    Attributes
    ----------
    dtype, lse_dtype : str
    rank : int
        The rank of the first array; see `rank_of` for the others.
    shapes, full : dict
        The shape of each array, as passed and in full rank.
    """

    def __init__(self, seen: tuple[tuple, ...]) -> None:
        self.seen = seen
        self.shapes = {name: tuple(shape) for name, shape, *_ in seen}
        dtypes = {name: np.dtype(x).name for name, _, _, x, *_ in seen}
        self.first = first = next(iter(self.shapes))
        self.dtype = dtypes[first]
        self.lse_dtype = "float64" if self.dtype == "float64" else "float32"
        self.rank = len(self.shapes[first])
        self.check_first()
        self.full = {}
        for name, shape in self.shapes.items():
            self.check_dtype(name, dtypes[name])
            self._check_rank(name)
            self.full[name] = self._full(name, shape)

    def rank_of(self, name: str) -> int:
        """The rank that an array must have."""
        return self.rank - like_lse(name)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The names of an array's axes in full rank."""
        return AXES_LSE if like_lse(name) else AXES

    def check_first(self) -> None:
        """Check the dtype and the rank of the first array."""
        if self.dtype not in DTYPES:
            raise DTypeError(
                f"{self.first} has dtype {self.dtype}, expected "
                f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
            )
        if self.rank not in _LAYOUTS:
            raise ShapeError(
                f"{self.first} has {axes_in_words(self.rank)}, expected 2, 3 "
                f"or 4 ({self.first} {self.shapes[self.first]}; layout is "
                f"{_LAYOUTS[2]}, {_LAYOUTS[3]} or {_LAYOUTS[4]})"
            )

    def check_dtype(self, name: str, got: str) -> None:
        """Check an array's dtype against that of the first."""
        if not like_lse(name):
            if got != self.dtype:
                raise DTypeError(
                    f"{name} has dtype {got}, expected {self.dtype} as in "
                    f"{self.first}: arrays of one call have one dtype"
                )
            return
        if got != self.lse_dtype:
            raise DTypeError(
                f"{name} has dtype {got}, expected {self.lse_dtype} as "
                f"{self.first} has dtype {self.dtype}: lse is float32, and "
                "float64 for float64 arrays"
            )

    def _check_rank(self, name: str) -> None:
        got = len(self.shapes[name])
        expected = self.rank_of(name)
        if got != expected:
            raise ShapeError(
                f"{name} has {axes_in_words(got)}, expected {expected} as "
                f"{self.first} has {self.rank} "
                f"{self.words(self.first, name)}{self._other_array(name)}"
            )

    def _other_array(self, name: str) -> str:
        """Advice where another array was passed as `name`."""
        if like_lse(name) and self.shapes[name] == self.shapes[self.first]:
            return f": pass {name} as forward returns it with return_lse=True"
        batch = self.shapes[self.first][:1]
        is_lse = self.rank == 4 and self.shapes[name][:1] == batch
        if name == "out" and "dout" in self.shapes and is_lse:
            return ": the order is dout, q, k, v, out, lse"
        return ""

    def _full(self, name: str, shape: tuple) -> tuple:
        """A shape, or strides, in full rank; inserted axes have 1."""
        if not like_lse(name):
            return in_full_rank(shape)
        return (1,) * (3 - len(shape)) + shape

    def layouts(self) -> dict[str, Layout]:
        """The layout of each array, in full rank."""
        return {
            name: Layout(
                self.full[name], self._full(name, strides), dtype, offset
            )
            for name, _, strides, dtype, offset, _ in self.seen
        }

    def problem(
        self, direction: Any, q: str, v: str, **fields: Any
    ) -> Problem:
        """A problem whose sizes are those of two arrays, unless given."""
        batch, seqlen_q, num_heads_q, head_dim = self.full[q]
        _, seqlen_k, num_heads_kv, head_dim_v = self.full[v]
        sizes = {
            "batch": batch,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "num_heads_q": num_heads_q,
            "num_heads_kv": num_heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
        }
        return Problem(direction, self.dtype, **{**sizes, **fields})

    def check_same(self, name: str, axes: tuple[str, ...], other: str) -> None:
        """Check that `name` and `other` have the same size on each axis."""
        names, names_of_other = self.axes_of(name), self.axes_of(other)
        for axis in axes:
            got = self.full[name][names.index(axis)]
            expected = self.full[other][names_of_other.index(axis)]
            if got != expected:
                raise ShapeError(
                    f"{name} has {axis} {got}, expected {expected} as in "
                    f"{other} {self.words(other, name)}"
                    f"{self._turned(name, other)}"
                )

    def _turned(self, name: str, other: str) -> str:
        """Advice for an lse whose last two axes are those of `other`."""
        if not like_lse(name) or self.rank == 2:
            return ""
        batch, seqlen, heads, _ = self.full[other]
        if self.full[name] != (batch, seqlen, heads):
            return ""
        return f": pass {name}.swapaxes(-1, -2)"

    def check_groups(self, k: str) -> None:
        """Check that each key head serves the same number of query heads."""
        num_heads_q, num_heads_kv = self.full["q"][2], self.full[k][2]
        if num_heads_q % num_heads_kv if num_heads_kv else num_heads_q:
            raise ShapeError(
                f"q has heads {num_heads_q}, expected a multiple of {k}'s "
                f"{num_heads_kv}: each key head serves a group of query "
                f"heads of the same size {self.words('q', k)}"
                f"{self._heads_first(k)}"
            )

    def _heads_first(self, k: str) -> str:
        """Advice for q and k, or k alone, with heads before seqlen."""
        if self.rank == 2:
            return ""
        (_, seqlen_q, heads_q, _), (_, heads_k, _, _) = (
            self.full[name] for name in ("q", k)
        )
        axes = f"({self.rank - 3}, {self.rank - 2})"
        cure = "pass heads after tokens"
        if heads_k and seqlen_q and seqlen_q % heads_k == 0:
            return f": {cure}, q.swapaxes{axes} and so on, if they are before"
        if heads_k and heads_q and heads_q % heads_k == 0:
            return f": {cure}, {k}.swapaxes{axes}, if they are before"
        return ""

    def check_sizes(self, k: str, v: str) -> None:
        """Check heads, lengths and head dimensions of q, keys and values."""
        self.check_groups(k)
        for name in ("q", k):
            self.check_lengths(name)
        self.check_head_dim("q")
        if v != k:
            self.check_head_dim(v, MAX_HEAD_DIM_V)

    def check_like_out(self, name: str, v: str) -> None:
        """Check that an array has the shape of out."""
        self.check_same(name, (*self.axes_of("q")[:2], "heads"), "q")
        self.check_same(name, ("head_dim",), v)

    def check_lengths(self, name: str) -> None:
        """Check that tokens, heads and batches can be counted in int32."""
        axes = self.axes_of(name)[:3]
        sizes = dict(zip(axes, self.full[name], strict=False))
        batch, _, heads = axes
        sizes[f"{batch} * {heads}"] = sizes[batch] * sizes[heads]
        for what, size in sizes.items():
            if size > MAX_LENGTH:
                raise UnsupportedError(
                    f"{name} has {what} {size}, expected at most "
                    f"{MAX_LENGTH}: kernels count in 32-bit integers, up to "
                    "the end of the last tile, which may be 1024 past the "
                    f"array's {self.words(name)}"
                )

    def check_head_dim(self, name: str, most: int = MAX_HEAD_DIM) -> None:
        """Check that some kernel supports the head dimension."""
        head_dim = self.shapes[name][-1]
        if head_dim < 1:
            raise ShapeError(
                f"{name} has head_dim 0, expected at least 1 "
                f"{self.words(name)}"
            )
        if head_dim > most:
            raise UnsupportedError(
                f"{name} has head_dim {head_dim}, expected at most "
                f"{most}: no kernel supports wider rows "
                f"{self.words(name)}"
            )

    def words(self, *names: str) -> str:
        """The shapes of some arrays and the meaning of their axes."""
        known = sorted(names, key=list(self.shapes).index)
        shapes = ", ".join(f"{name} {self.shapes[name]}" for name in known)
        layouts = [f"layout is {_LAYOUTS[self.rank]}"]
        layouts += [
            f"of {name} {_LAYOUTS_LSE[self.rank]}"
            for name in known
            if like_lse(name)
        ]
        return f"({shapes}; {', '.join(layouts)})"


def in_full_rank(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, or strides, of q, k or v in full rank; new axes have 1."""
    if len(sizes) == 4:
        return sizes
    return (1, *sizes) if len(sizes) == 3 else (1, sizes[0], 1, sizes[1])


def check_integers(name: str, dtype: Any) -> None:
    """Raise DTypeError unless an array holds integers."""
    got = np.dtype(dtype)
    if got.kind not in "iu":
        raise DTypeError(
            f"{name} has dtype {got.name}, expected an integer dtype: "
            f"convert {name} to int32"
        )


def axes_in_words(count: int) -> str:
    return f"{count} axis" if count == 1 else f"{count} axes"
