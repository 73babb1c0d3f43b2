"""Shapes and dtypes of the arrays of `cuflash.forward_kvcache`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request.options import ARRAYS
from cuflash.request.problem import Layout
from cuflash.request.validate.descriptions import layout_of
from cuflash.request.validate.option_arrays import Sizes, check, check_array
from cuflash.request.validate.rotary import check_cos_and_sin
from cuflash.request.validate.shapes import (
    DTYPES,
    MAX_LENGTH_OF_OPTIONS,
    Arrays,
    axes_in_words,
    check_integers,
)

FLOAT8 = "float8_e4m3fn"
# CuPy has no float8 dtype: its users hold the bytes.
_FLOAT8_NAMES = (FLOAT8, "uint8")

CACHES = ("k_cache", "v_cache")
_NEW = ("k_new", "v_new")
_SCALES = ("k_scale", "v_scale")
_TABLES = ("rotary_cos", "rotary_sin")
INPUTS = ("q", *CACHES, "out", *_NEW)

_SLOTS = ("slots", "capacity")


class CacheArrays(Arrays):
    """q, out, the caches and the new tokens."""

    def __init__(
        self, seen: tuple[tuple, ...], *, packed: bool, paged: bool
    ) -> None:
        self.packed, self.paged = packed, paged
        ranks = {name: len(shape) for name, shape, *_ in seen}
        self.packed_new = packed and ranks.get("k_new") == 3
        (of_k,) = (np.dtype(x[3]).name for x in seen if x[0] == "k_cache")
        self.cache_dtype: Any = FLOAT8 if of_k in _FLOAT8_NAMES else of_k
        super().__init__(seen)

    def rank_of(self, name: str) -> int:
        if name in ("q", "out"):
            return self.rank
        return 3 if name in _NEW and self.packed_new else 4

    def axes_of(self, name: str) -> tuple[str, ...]:
        if name in CACHES:
            first = ("pages", "page_size") if self.paged else _SLOTS
        elif self.rank_of(name) == 3:
            first = ("batch", "total_q")
        else:
            first = ("batch", "seqlen")
        return (*first, "heads", "head_dim")

    def words(self, *names: str) -> str:
        known = sorted(names, key=list(self.shapes).index)
        each = (
            f"{name} {self.shapes[name]} is ({', '.join(self._layout(name))})"
            for name in known
        )
        return f"({', '.join(each)})"

    def _layout(self, name: str) -> tuple[str, ...]:
        return self.axes_of(name)[4 - self.rank_of(name) :]

    def check_first(self) -> None:
        if self.dtype not in DTYPES:
            super().check_first()
        expected = 3 if self.packed else 4
        if self.rank != expected:
            why = (
                "3 as cu_seqlens_q is given (layout is (total_q, heads, "
                "head_dim))"
                if self.packed
                else "2, 3 or 4 (layout is (seqlen, head_dim), (seqlen, "
                "heads, head_dim) or (batch, seqlen, heads, head_dim))"
            )
            raise ShapeError(
                f"q has {axes_in_words(self.rank)}, expected {why}"
            )

    def check_dtype(self, name: str, got: str) -> None:
        if name == "k_cache":
            if got not in (self.dtype, *_FLOAT8_NAMES):
                raise DTypeError(
                    f"{name} has dtype {got}, expected {self.dtype} as in q, "
                    f"or {FLOAT8}, or its bytes as uint8"
                )
            if self.cache_dtype == FLOAT8 and self.dtype == "float64":
                raise DTypeError(
                    f"{name} has dtype {got}, expected float64 as in q: "
                    "float8 caches are for float16, bfloat16 and float32"
                )
        elif name == "v_cache":
            own = got in _FLOAT8_NAMES
            if got != self.cache_dtype and not (
                own and self.cache_dtype == FLOAT8
            ):
                raise DTypeError(
                    f"{name} has dtype {got}, expected {self.cache_dtype} as "
                    "in k_cache: both caches have one dtype"
                )
        else:
            super().check_dtype(name, got)

    def check_caches(self) -> None:
        """Check that kernels can access the caches, which are not copied."""
        for name, shape, strides, dtype, offset, _ in self.seen:
            if name not in CACHES or 0 in shape:
                continue
            rows = zip(strides, shape, strict=True)
            sizes = [stride for stride, length in rows if length > 1]
            side_by_side = shape[-1] == 1 or strides[-1] == dtype.itemsize
            aligned = not any(x % dtype.itemsize for x in (offset, *sizes))
            if not (side_by_side and aligned and dtype.isnative):
                raise UnsupportedError(
                    f"{name} has strides {tuple(strides)} bytes and dtype "
                    f"{dtype.str}, expected aligned elements in native byte "
                    "order, side by side along head_dim: caches are used in "
                    "place, not copied"
                )

    def check(self) -> None:
        """Check the shapes of all arrays against one another."""
        slots = self.axes_of("k_cache")[:2]
        self.check_same("v_cache", (*slots, "heads"), "k_cache")
        self.check_same("k_cache", ("head_dim",), "q")
        self.check_sizes("k_cache", "v_cache")
        if self.paged and self.full["k_cache"][1] < 1:
            raise ShapeError(
                "k_cache has page_size 0, expected at least 1 "
                f"{self.words('k_cache')}"
            )
        if "out" in self.shapes:
            self.check_like_out("out", "v_cache")
        if "k_new" in self.shapes:
            tokens = self.axes_of("k_new")[:2]
            if "v_new" in self.shapes:
                self.check_same("v_new", tokens, "k_new")
            for new, cache in zip(_NEW, CACHES, strict=True):
                if new in self.shapes:
                    self.check_same(new, ("heads", "head_dim"), cache)
            if self.packed_new:
                self.check_same("k_new", ("total_q",), "q")


class Others:
    """The arrays other than q, out, caches and new tokens, and the sizes.

    Attributes
    ----------
    layouts : dict of str to Layout
        Of these arrays. Slopes and scales are broadcast: (batch,
        num_heads_q) and (slots or pages, num_heads_kv).
    of_heads : dict of str to Layout
        Those of `layouts` that `cuflash.forward` has too.
    batch, seqlen_q, seqlen_new, capacity, max_pages, scales
        As in `problem.Problem` and `problem.KVCache`.
    """

    def __init__(
        self,
        arrays: CacheArrays,
        by_name: dict[str, tuple],
        max_seqlen_q: int | None,
    ) -> None:
        self.arrays, self.by_name = arrays, by_name
        self.where = "cu_seqlens_q" if arrays.packed else "q"
        self.slots, rows, self.num_heads_kv, _ = arrays.full["k_cache"]
        self.batch, self.seqlen_q, self.num_heads_q, _ = arrays.full["q"]
        self.max_pages, self.capacity = 0, rows
        self.layouts: dict[str, Layout] = {}
        if arrays.packed:
            name, shape, _, dtype, *_ = by_name["cu_seqlens_q"]
            check_array(name, tuple(shape), dtype, self._sizes())
            (ends,) = self._keep(name).shape
            self.batch = ends - 1
            if max_seqlen_q is not None:
                self.seqlen_q = min(max_seqlen_q, self.seqlen_q)
        if arrays.paged:
            full, words = (self.batch, None), "(batch, max_pages)"
            self.max_pages = self._index("page_table", full, words)[1]
            self.capacity = rows * self.max_pages
        self._check_capacity()
        self.seqlen_new = self._new()
        self._check_slots()
        for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
            if name in self.by_name:
                self._index(name, (self.batch,), "(batch,)")
        self.scales = self._scales()
        if "rotary_cos" in by_name:
            tables = tuple(by_name[name] for name in _TABLES)
            self.layouts |= check_cos_and_sin(arrays, tables)
        known = [x for x in ARRAYS if x in by_name and x not in self.layouts]
        seen = tuple(by_name[x] for x in known)
        self.of_heads = check(seen, self._sizes())
        self.layouts |= self.of_heads

    def _sizes(self) -> Sizes:
        arrays = self.arrays
        return Sizes(
            self.batch, self.seqlen_q, self.capacity, self.num_heads_q,
            arrays.rank, arrays.dtype, arrays.lse_dtype,
            self.batch if arrays.packed else None,
        )  # fmt: skip

    def _keep(self, name: str, full: tuple[int, ...] | None = None) -> Layout:
        """Describe an array, broadcast to its full shape."""
        self.layouts[name] = layout_of(self.by_name[name], full)
        return self.layouts[name]

    def _index(
        self, name: str, full: tuple[int | None, ...], words: str
    ) -> tuple[int, ...]:
        """Check an array of integers; None in `full` is any size."""
        _, shape, _, dtype, *_ = self.by_name[name]
        shape = tuple(shape)
        check_integers(name, dtype)
        if name == "cache_seqlens" and not shape:  # on a device: not read
            return self._keep(name, (self.batch,)).shape
        fits = len(shape) == len(full) and all(
            n in (None, size) for n, size in zip(full, shape, strict=True)
        )
        if not fits:
            raise ShapeError(
                f"{name} has shape {shape}, expected {words} with batch "
                f"{self.batch} as in {self.where}"
            )
        return self._keep(name).shape

    def _check_capacity(self) -> None:
        if self.capacity <= MAX_LENGTH_OF_OPTIONS:
            return
        shapes = self.arrays.words("k_cache")
        raise UnsupportedError(
            f"k_cache has a capacity of {self.capacity} tokens a sequence, "
            f"expected at most {MAX_LENGTH_OF_OPTIONS}: kernels compute the "
            f"ends of a window in 32 bits {shapes}"
        )

    def _new(self) -> int:
        """Check the tokens that are appended; return how many, at most."""
        arrays = self.arrays
        if "k_new" not in arrays.full:
            return 0
        if arrays.packed_new:
            return self.seqlen_q
        batch, seqlen_new, *_ = arrays.full["k_new"]
        if batch != self.batch:
            raise ShapeError(
                f"k_new has batch {batch}, expected {self.batch} as in "
                f"{self.where} {arrays.words('q', 'k_new')}"
            )
        if seqlen_new > self.capacity:
            raise ShapeError(
                f"k_new has seqlen {seqlen_new}, expected at most "
                f"{self.capacity}, the capacity of a sequence "
                f"{arrays.words('k_cache', 'k_new')}"
            )
        return seqlen_new

    def _check_slots(self) -> None:
        if self.arrays.paged or "cache_batch_idx" in self.by_name:
            return
        if self.slots != self.batch:
            raise ShapeError(
                f"k_cache has slots {self.slots}, expected {self.batch}, the "
                "batch: without cache_batch_idx, sequence b is in slot b "
                f"{self.arrays.words('q', 'k_cache')}"
            )

    def _scales(self) -> Any:
        """Check k_scale and v_scale; return what a scale is for."""
        is_float8 = self.arrays.cache_dtype == FLOAT8
        dtype = np.dtype(self.by_name["k_cache"][3]).name
        if "k_scale" not in self.by_name:
            if is_float8:
                raise ValueRangeError(
                    "k_scale and v_scale are None, expected arrays as "
                    f"k_cache has dtype {dtype}: a value is stored * scale"
                )
            return None
        if not is_float8:
            raise ValueRangeError(
                f"k_scale is given with k_cache of dtype {dtype}, expected "
                f"{FLOAT8}: other caches have no scales"
            )
        full = (self.slots, self.num_heads_kv)
        known = [full[1:], full] if self.arrays.paged else [full[1:]]
        words = "(heads,) or (pages, heads)" if len(known) > 1 else "(heads,)"
        each = []
        for name in _SCALES:
            _, shape, _, kind, *_ = self.by_name[name]
            got, shape = np.dtype(kind).name, tuple(shape)
            if got != "float32":
                raise DTypeError(f"{name} has dtype {got}, expected float32")
            if shape not in known:
                raise ShapeError(
                    f"{name} has shape {shape}, expected "
                    f"{' or '.join(map(str, known))} as in k_cache (layout "
                    f"is {words})"
                )
            self._keep(name, full)
            each.append(len(shape))
        return "page" if 2 in each else "head"
