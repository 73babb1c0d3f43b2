"""Validation of the arguments of `cuflash.forward_kvcache`.

As in `validate`, results are cached by everything but the arrays' data, so a
repeated call is one look-up. A length given as an int is data too: it grows
by one with each token. `values` reads the data of arrays.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.errors import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
)
from cuflash.request import checks
from cuflash.request.options import (
    INDICES,
    Sizes,
    broadcast_strides,
    check,
    check_array,
    check_integers,
)
from cuflash.request.problem import (
    Call,
    KVCache,
    Layout,
    Problem,
    Rotary,
    Signature,
)
from cuflash.request.validate import (
    DTYPES,
    MAX_LENGTH_OF_OPTIONS,
    Arrays,
    address,
    addresses,
    axes_in_words,
    bounds_that_mask,
    check_cos_and_sin,
    check_elements_apart,
    check_offsets,
    check_one_device,
    default_scale,
    describe,
    on_host,
    remembered,
    scale_of,
    shares_memory,
    span,
    splits_of,
)

FLOAT8 = "float8_e4m3fn"
# CuPy has no float8 dtype: its users hold the bytes.
_FLOAT8_NAMES = (FLOAT8, "uint8")

_CACHES = ("k_cache", "v_cache")
_NEW = ("k_new", "v_new")
_SCALES = ("k_scale", "v_scale")
_TABLES = ("rotary_cos", "rotary_sin")
_INPUTS = ("q", *_CACHES, "out", *_NEW)

# (given, needed, why): ValueRangeError for the first without the second.
_PARTNERS = (
    ("k_new", "v_new", "a token has a key and a value"),
    ("v_new", "k_new", "a token has a key and a value"),
    ("k_new", "cache_seqlens", "new tokens are appended there"),
    ("rotary_cos", "rotary_sin", "a rotation has a cosine and a sine"),
    ("rotary_sin", "rotary_cos", "a rotation has a cosine and a sine"),
    ("rotary_cos", "k_new", "keys are rotated when they are appended"),
    ("k_scale", "v_scale", "both caches are float8"),
    ("v_scale", "k_scale", "both caches are float8"),
    ("max_seqlen_q", "cu_seqlens_q", "it bounds the lengths of packed q"),
)


@dataclass(frozen=True, eq=False)
class Checked:
    """A signature, and where its arrays lie from their addresses.

    Attributes
    ----------
    signature : Signature
    names : tuple of str
    memory : tuple of (shape, strides, itemsize)
    spans : tuple of (int, int)
        The bytes [low, high) of each array; see `validate.span`.
    written : tuple of int
        The indices of the arrays that the call writes.
    """

    signature: Signature
    names: tuple[str, ...]
    memory: tuple[tuple, ...]
    spans: tuple[tuple[int, int], ...]
    written: tuple[int, ...]


def forward_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    k_new: Any = None,
    v_new: Any = None,
    cache_seqlens: Any = None,
    max_seqlen_q: Any = None,
    rotary_interleaved: Any = False,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: Any = None,
    num_splits: Any = None,
    out: Any = None,
    return_lse: Any = False,
    **options: Any,
) -> Call:
    """Check the arguments of `cuflash.forward_kvcache`; see there.

    `options` holds only the arrays that the user passed.
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if k_new is not None:
        given["k_new"] = k_new
    if v_new is not None:
        given["v_new"] = v_new
    by_int = is_int(cache_seqlens)
    if cache_seqlens is not None and not by_int:
        options["cache_seqlens"] = cache_seqlens
    arrays = {**given, **options}
    if out is not None:
        arrays["out"] = out
    checked = check_call(
        arrays,
        by_int,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    if checked.written:
        check_apart(checked, tuple(map(address, arrays.values())))
    signature = checked.signature
    length = signature.problem.seqlen_k
    if by_int:
        length = length_of(cache_seqlens, signature.problem)
    return Call(signature, given, out, options, cache_seqlens=length)


def check_call(
    arrays: dict[str, Any],
    by_int: bool,
    *,
    max_seqlen_q: Any = None,
    rotary_interleaved: Any = False,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: Any = None,
    num_splits: Any = None,
    return_lse: Any = False,
) -> Checked:
    """Check all but where the arrays lie, and a length that is an int.

    Parameters
    ----------
    arrays : dict
        All arrays by argument name, `out` among them, q first.
    by_int : bool
        Whether cache_seqlens is an int.
    """
    return _checked(
        describe(arrays),
        by_int,
        None if max_seqlen_q is None
        else checks.length("max_seqlen_q", max_seqlen_q),
        checks.flag("rotary_interleaved", rotary_interleaved),
        scale_of(scale),
        checks.flag("causal", causal),
        checks.window("window", window),
        checks.softcap("softcap", softcap),
        splits_of(num_splits),
        checks.flag("return_lse", return_lse),
    )  # fmt: skip


def with_batch(arrays: dict[str, Any]) -> dict[str, Any]:
    """Views with the axes that q leaves out, as `forward` inserts them.

    q without batch is (seqlen, heads, head_dim) or (seqlen, head_dim); the
    caches then hold one sequence, (capacity, heads, head_dim) or (capacity,
    head_dim), or pages. A packed q has no batch, and is left as it is.
    """
    rank = arrays["q"].ndim
    if rank not in (2, 3) or "cu_seqlens_q" in arrays:
        return arrays
    views = dict(arrays)
    for name in _INPUTS:
        x = arrays.get(name)
        if x is None:
            continue
        if rank == 2:
            x = x[..., None, :]
        if x.ndim == 3:  # caches of pages, or with slots, have 4 axes
            x = x[None]
        views[name] = x
    for name, ndim in (
        ("page_table", 2), ("cache_seqlens", 1), ("cache_batch_idx", 1),
        ("cache_leftpad", 1),
    ):  # fmt: skip
        x = arrays.get(name)
        if x is not None and x.ndim == ndim - 1:
            views[name] = x[None]
    return views


def is_int(cache_seqlens: Any) -> bool:
    """Whether cache_seqlens is one length; a bool is refused later."""
    return isinstance(cache_seqlens, (int, numbers.Integral))


def length_or_array(cache_seqlens: Any) -> Any:
    """cache_seqlens, an int if it is an array of NumPy without axes.

    Raises
    ------
    DTypeError
        If it is a number but not an int.
    """
    if isinstance(cache_seqlens, np.ndarray) and not cache_seqlens.ndim:
        cache_seqlens = cache_seqlens.item()
    if isinstance(cache_seqlens, (float, np.floating)):
        raise DTypeError(
            f"cache_seqlens is {in_words(cache_seqlens)}, expected an int or "
            "an array of integers: pass int(cache_seqlens)"
        )
    return cache_seqlens


def length_of(given: Any, p: Problem) -> int:
    """Check a length that is an int."""
    cache = p.kvcache
    assert cache is not None
    length = checks.whole("cache_seqlens", given, -(2**63), 2**63)
    # The number of packed tokens that a sequence appends is on the device.
    new = 0 if cache.packed_new else cache.seqlen_new
    if not 0 <= length <= p.seqlen_k - new:
        raise ValueRangeError(
            f"cache_seqlens is {length}, expected {_room(p, new)}"
        )
    return length


def _room(p: Problem, new: int) -> str:
    """The lengths that leave room for new tokens."""
    text = (
        f"0 to {p.seqlen_k - new}: the caches hold {p.seqlen_k} tokens a "
        "sequence"
    )
    return f"{text}, and {new} are appended" if new else text


# Shapes and dtypes -------------------------------------------------------


@remembered
def _checked(
    seen: tuple[tuple, ...],
    by_int: bool,
    max_seqlen_q: int | None,
    rotary_interleaved: bool,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    num_splits: int | None,
    return_lse: bool,
) -> Checked:
    """Check a call; nothing here depends on the data."""
    check_one_device(seen)
    by_name = {x[0]: x for x in seen}
    given = {*by_name}
    if by_int:
        given.add("cache_seqlens")
    if max_seqlen_q is not None:
        given.add("max_seqlen_q")
    _check_together(given)
    arrays = _Arrays(
        tuple(x for x in seen if x[0] in _INPUTS),
        packed="cu_seqlens_q" in given,
        paged="page_table" in given,
    )
    arrays.check()
    arrays.check_caches()
    others = _Others(arrays, by_name, max_seqlen_q)
    options = others.layouts
    rotary = None
    if "rotary_cos" in options:
        table = options["rotary_cos"]
        num_positions, num_pairs = table.shape
        rotary = Rotary(
            2 * num_pairs,
            num_positions,
            table.dtype.name,
            None,
            rotary_interleaved,
            False,
        )
    _, _, num_heads_q, head_dim = arrays.full["q"]
    slots, rows, num_heads_kv, head_dim_v = arrays.full["v_cache"]
    # No length exceeds the capacity, so bounds beyond it mask nothing. But a
    # window decides by which positions queries are rotated.
    causal, window = bounds_that_mask(
        causal, window, others.seqlen_q, others.capacity, rotary is not None
    )
    left, right = window
    window = (
        None if left is None else min(left, others.capacity),
        None if right is None else min(right, others.seqlen_q),
    )
    problem = Problem(
        direction="kvcache",
        dtype=arrays.dtype,
        batch=others.batch,
        seqlen_q=others.seqlen_q,
        seqlen_k=others.capacity,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=default_scale(scale, head_dim, arrays.dtype),
        causal=causal,
        num_splits=num_splits,
        window=window,
        softcap=softcap,
        alibi_slopes="alibi_slopes" in options,
        sink="sink" in options,
        kvcache=KVCache(
            dtype=arrays.cache_dtype,
            page_size=rows if arrays.paged else None,
            slots=slots,
            max_pages=others.max_pages,
            seqlen_new=others.seqlen_new,
            lengths="cache_seqlens" in options,
            batch_idx="cache_batch_idx" in options,
            leftpad="cache_leftpad" in options,
            packed_queries=arrays.packed,
            packed_new=arrays.packed_new,
            total_q=math.prod(arrays.full["q"][:2]),
            scales=others.scales,
            rotary=rotary,
        ),
    )
    signature = Signature(
        problem, arrays.rank, arrays.layouts(), return_lse, options
    )
    return _with_memory(signature, seen)


def _check_together(given: set[str]) -> None:
    """Check the arguments that require or exclude one another."""
    for name, needed, why in _PARTNERS:
        if name in given and needed not in given:
            raise ValueRangeError(
                f"{name} is given without {needed}, expected {needed} too: "
                f"{why}"
            )
    for name in ("cache_batch_idx", "cache_leftpad"):
        if {name, "page_table"} <= given:
            raise UnsupportedError(
                f"{name} is given with page_table, expected one of them: "
                "a page table tells where each token is, from the first on"
            )


class _Arrays(Arrays):
    """q, out, the caches and the new tokens."""

    def __init__(
        self, seen: tuple[tuple, ...], *, packed: bool, paged: bool
    ) -> None:
        self.packed, self.paged = packed, paged
        ranks = {name: len(shape) for name, shape, *_ in seen}
        self.packed_new = packed and ranks.get("k_new") == 3
        dtypes = {name: np.dtype(x).name for name, _, _, x, *_ in seen}
        of_k = dtypes["k_cache"]
        self.cache_dtype: Any = FLOAT8 if of_k in _FLOAT8_NAMES else of_k
        super().__init__(seen)

    def rank_of(self, name: str) -> int:
        if name in ("q", "out"):
            return self.rank
        return 3 if name in _NEW and self.packed_new else 4

    def axes_of(self, name: str) -> tuple[str, ...]:
        if name in _CACHES:
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
            if name not in _CACHES or 0 in shape:
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
        self.check_groups("k_cache")
        self.check_lengths("q")
        self.check_lengths("k_cache")
        self.check_head_dim("q")
        self.check_head_dim("v_cache")
        if self.paged and self.full["k_cache"][1] < 1:
            raise ShapeError(
                "k_cache has page_size 0, expected at least 1 "
                f"{self.words('k_cache')}"
            )
        if "out" in self.shapes:
            tokens = self.axes_of("q")[:2]
            self.check_same("out", (*tokens, "heads"), "q")
            self.check_same("out", ("head_dim",), "v_cache")
        if "k_new" in self.shapes:
            tokens = self.axes_of("k_new")[:2]
            self.check_same("v_new", tokens, "k_new")
            for new, cache in zip(_NEW, _CACHES, strict=True):
                self.check_same(new, ("heads", "head_dim"), cache)
            if self.packed_new:
                self.check_same("k_new", ("total_q",), "q")


_SLOTS = ("slots", "capacity")


class _Others:
    """The arrays other than q, out, caches and new tokens, and the sizes.

    Attributes
    ----------
    layouts : dict of str to Layout
        Of these arrays. Slopes and scales are broadcast: (batch,
        num_heads_q) and (slots or pages, num_heads_kv).
    batch, seqlen_q, seqlen_new, capacity, max_pages, scales
        As in `problem.Problem` and `problem.KVCache`.
    """

    def __init__(
        self,
        arrays: _Arrays,
        by_name: dict[str, tuple],
        max_seqlen_q: int | None,
    ) -> None:
        self.arrays, self.by_name = arrays, by_name
        self.slots, rows, self.num_heads_kv, _ = arrays.full["k_cache"]
        self.batch, self.seqlen_q, self.num_heads_q, _ = arrays.full["q"]
        self.layouts: dict[str, Layout] = {}
        if arrays.packed:
            (ends,) = self._option("cu_seqlens_q").shape
            self.batch = ends - 1
            if max_seqlen_q is not None:
                self.seqlen_q = min(max_seqlen_q, self.seqlen_q)
        self.max_pages, self.capacity = 0, rows
        if arrays.paged:
            self.max_pages = self._page_table()
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
        heads = tuple(
            by_name[x] for x in ("alibi_slopes", "sink") if x in by_name
        )
        self.layouts |= check(heads, self._sizes())

    def _sizes(self) -> Sizes:
        dtype = self.arrays.dtype
        return Sizes(
            self.batch,
            self.seqlen_q,
            self.capacity,
            self.num_heads_q,
            self.arrays.rank,
            dtype,
            "float64" if dtype == "float64" else "float32",
            self.batch if self.arrays.packed else None,
        )

    def _option(self, name: str) -> Layout:
        """Check an array by the table of options."""
        _, shape, strides, dtype, offset, _ = self.by_name[name]
        sizes = Sizes(
            0, 0, 0, 0, self.arrays.rank, self.arrays.dtype, "float32"
        )
        check_array(name, tuple(shape), dtype, sizes)
        return self._keep(name)

    def _keep(self, name: str, full: tuple[int, ...] | None = None) -> Layout:
        """Describe an array, broadcast to its full shape."""
        _, shape, strides, dtype, offset, _ = self.by_name[name]
        shape = tuple(shape)
        full = shape if full is None else full
        strides = broadcast_strides(shape, tuple(strides), full)
        self.layouts[name] = Layout(full, strides, dtype, offset)
        return self.layouts[name]

    def _index(
        self, name: str, full: tuple[int | None, ...], words: str
    ) -> tuple[int, ...]:
        """Check an array of integers; None in `full` is any size."""
        _, shape, _, dtype, *_ = self.by_name[name]
        shape = tuple(shape)
        check_integers(name, dtype)
        if name == "cache_seqlens" and not shape:  # on a device: not read
            self._keep(name, (self.batch,))
            return shape
        fits = len(shape) == len(full) and all(
            n in (None, size) for n, size in zip(full, shape, strict=True)
        )
        if not fits:
            where = "cu_seqlens_q" if self.arrays.packed else "q"
            raise ShapeError(
                f"{name} has shape {shape}, expected {words} with batch "
                f"{self.batch} as in {where}"
            )
        self._keep(name)
        return shape

    def _page_table(self) -> int:
        words = "(batch, max_pages)"
        return self._index("page_table", (self.batch, None), words)[1]

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
            where = "cu_seqlens_q" if arrays.packed else "q"
            raise ShapeError(
                f"k_new has batch {batch}, expected {self.batch} as in "
                f"{where} {arrays.words('q', 'k_new')}"
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


# Memory that is written to -----------------------------------------------


def _with_memory(signature: Signature, seen: tuple[tuple, ...]) -> Checked:
    names = tuple(name for name, *_ in seen)
    memory = tuple(
        (tuple(shape), tuple(strides), np.dtype(dtype).itemsize)
        for _, shape, strides, dtype, *_ in seen
    )
    targets = ("out", *(_CACHES if "k_new" in names else ()))
    written = tuple(i for i, name in enumerate(names) if name in targets)
    for i in written:
        check_elements_apart(names[i], *memory[i])
    spans = tuple(span(*x) for x in memory)
    return Checked(signature, names, memory, spans, written)


# Addresses repeat: see `execute`.
@remembered
def check_apart(checked: Checked, starts: tuple[int, ...]) -> None:
    """Check that what is written shares no memory with another array."""
    ends = [
        (start + low, start + high)
        for start, (low, high) in zip(starts, checked.spans, strict=True)
    ]
    for i in checked.written:
        first, end = ends[i]
        for j, (other_first, other_end) in enumerate(ends):
            if first < other_end and other_first < end and i != j:
                distance = starts[j] - starts[i]
                if _overlap(checked.memory[i], checked.memory[j], distance):
                    raise shares_memory(checked.names[i], checked.names[j])


@remembered
def _overlap(memory: tuple, other: tuple, distance: int) -> bool:
    """Whether two arrays, `distance` bytes apart, share an element.

    Cached: the answer takes long for caches that lie between each other, such
    as k and v of one array, and is the same in each call.
    """
    start = 2**62  # no address is negative
    return np.shares_memory(
        addresses(start, *memory), addresses(start + distance, *other)
    )


# Values ------------------------------------------------------------------


def values(call: Call) -> None:
    """Raise ValueRangeError if a length, a slot or a page is invalid.

    It reads the arrays, so it waits for the device.
    """
    p = call.problem
    cache = p.kvcache
    assert cache is not None
    given = {
        name: on_host(array)
        for name, array in call.options.items()
        if name in INDICES
    }
    queries = np.full(p.batch, p.seqlen_q)
    if cache.packed_queries:
        offsets = given["cu_seqlens_q"]
        check_offsets(
            "cu_seqlens_q", offsets.tolist(), cache.total_q, p.seqlen_q
        )
        queries = np.diff(offsets)
    new = queries if cache.packed_new else np.full(p.batch, cache.seqlen_new)
    lengths = given.get("cache_seqlens")
    if lengths is None:
        lengths = np.full(p.batch, call.cache_seqlens)
    before = np.broadcast_to(lengths, p.batch).astype(np.int64)
    _check_lengths(before, new, p, cache.lengths)
    for name, most, why in (
        ("cache_batch_idx", cache.slots - 1, "the slots of k_cache"),
        ("cache_leftpad", 2**31 - 1, "it counts tokens"),
    ):
        if name in given:
            at = _first((given[name] < 0) | (given[name] > most))
            if at is not None:
                raise ValueRangeError(
                    f"{name}[{at[0]}] is {given[name][at]}, expected 0 to "
                    f"{most}: {why}"
                )
    if cache.page_size is not None:
        _check_pages(given["page_table"], before + new, cache)
    _check_rows_apart(given, before, new, cache)
    if cache.rotary is not None:
        ordered = p.causal or p.window != (None, None)
        turned = queries if ordered else np.minimum(queries, 1)
        last = before + np.maximum(new, turned)
        at = _first((last > cache.rotary.num_positions) & (new + turned > 0))
        if at is not None:
            rows = cache.rotary.num_positions
            raise ValueRangeError(
                f"{_name(at[0], cache.lengths)} is {before[at]}, and tokens "
                f"up to position {last[at] - 1} are rotated, expected "
                f"positions of 0 to {rows - 1}: rotary_cos has {rows} rows"
            )


def _check_lengths(
    before: np.ndarray, new: np.ndarray, p: Problem, is_array: bool
) -> None:
    at = _first((before < 0) | (before + new > p.seqlen_k))
    if at is not None:
        raise ValueRangeError(
            f"{_name(at[0], is_array)} is {before[at]}, expected "
            f"{_room(p, int(new[at]))}"
        )


def _check_pages(
    table: np.ndarray, lengths: np.ndarray, cache: KVCache
) -> None:
    """Check the pages that hold tokens; others are never read."""
    assert cache.page_size is not None
    starts = np.arange(cache.max_pages) * cache.page_size
    used = starts < lengths[:, None]
    at = _first(used & ((table < 0) | (table >= cache.slots)))
    if at is not None:
        raise ValueRangeError(
            f"page_table[{at[0]}, {at[1]}] is {table[at]}, expected 0 to "
            f"{cache.slots - 1}, the pages of k_cache: sequence {at[0]} has "
            f"{lengths[at[0]]} tokens, and a page holds {cache.page_size}"
        )


def _check_rows_apart(
    given: dict[str, np.ndarray],
    before: np.ndarray,
    new: np.ndarray,
    cache: KVCache,
) -> None:
    """Check that no two tokens are appended to one row of the caches."""
    sequence = np.repeat(np.arange(len(new)), new)
    # Tokens are numbered in their sequences; new ones lie end to end.
    token = np.arange(len(sequence)) + np.repeat(
        before - (np.cumsum(new) - new), new
    )
    if cache.page_size is not None:
        name, kind, row = "page_table", "page", token % cache.page_size
        place = [sequence, token // cache.page_size]
    elif "cache_batch_idx" in given:
        name, kind, row = "cache_batch_idx", "slot", token
        place = [sequence]
    else:
        return  # each sequence has a slot of its own
    slot = given[name][tuple(place)]
    order = np.lexsort((row, slot))
    same = (np.diff(slot[order]) == 0) & (np.diff(row[order]) == 0)
    at = _first(same)
    if at is None:
        return
    a, b = order[at[0]], order[at[0] + 1]
    one, other = (
        f"{name}[{', '.join(str(x[i]) for x in place)}]" for i in (a, b)
    )
    raise ValueRangeError(
        f"{other} is {slot[b]}, as is {one}, and token {token[b]} of sequence "
        f"{sequence[b]} is appended to the row of token {token[a]} of "
        f"sequence {sequence[a]}, expected a row for each: give one of them "
        f"another {kind}"
    )


def _first(bad: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True."""
    if not bad.any():
        return None
    return tuple(map(int, np.unravel_index(bad.argmax(), bad.shape)))


def _name(sequence: int, is_array: bool) -> str:
    return f"cache_seqlens[{sequence}]" if is_array else "cache_seqlens"
