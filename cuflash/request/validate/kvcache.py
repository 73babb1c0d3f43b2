"""Validation of the arguments of `cuflash.forward_kvcache`.

Results are remembered by everything but the arrays' data, see `descriptions`.
A length given as an int is data too: it grows by one with each token.
`kvcache_values` reads the data of arrays.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuflash.errors import (
    DTypeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
)
from cuflash.request import checks, traced
from cuflash.request.options import TABLE
from cuflash.request.problem import Call, KVCache, Problem, Signature
from cuflash.request.validate.attention import fields_of
from cuflash.request.validate.descriptions import (
    address,
    describe,
    layout_of,
    remembered,
)
from cuflash.request.validate.devices import check_one_device
from cuflash.request.validate.kvcache_arrays import (
    CACHES,
    INPUTS,
    CacheArrays,
    Others,
)
from cuflash.request.validate.memory import Memory, check_pairs, memory_of
from cuflash.request.validate.rotary import rotary_of
from cuflash.request.validate.scalars import (
    Numbers,
    bounds_that_mask,
    default_scale,
    scale_of,
    splits_of,
)

# What checks the table's numbers.
_CHECKS = {x.name: x.check for x in TABLE if x.check and x.with_caches}
# (given, needed, why): ValueRangeError for the first without the second.
_KEY_NEEDS_VALUE = ("k_new", "v_new", "a token has a key and a value")
_PARTNERS = (
    ("v_new", "k_new", "a token has a key and a value"),
    ("k_new", "cache_seqlens", "new tokens are appended there"),
    ("rotary_cos", "rotary_sin", "a rotation has a cosine and a sine"),
    ("rotary_sin", "rotary_cos", "a rotation has a cosine and a sine"),
    ("rotary_cos", "k_new", "keys are rotated when they are appended"),
    ("k_scale", "v_scale", "both caches are float8"),
    ("v_scale", "k_scale", "both caches are float8"),
    ("max_seqlen_q", "cu_seqlens_q", "it bounds the lengths of packed q"),
)


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
    num_splits: Any = None,
    out: Any = None,
    return_lse: Any = False,
    **options: Any,
) -> Call:
    """Check the arguments of `cuflash.forward_kvcache`; see there.

    `options` holds the table's numbers, and the arrays that the user passed.
    """
    asked = {}
    for name in _CHECKS:
        if (x := options.pop(name, None)) is not None:
            asked[name] = x
    functions = traced.taken(options)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if k_new is not None:
        given["k_new"] = k_new
    if v_new is not None:
        given["v_new"] = v_new
    latent = are_first_columns(k_cache, v_cache, address)
    if latent and v_new is not None:
        check_new_values(are_first_columns(k_new, v_new, address))
        check_new_scales(options, address)
        del given["v_new"]
    by_int = is_int(cache_seqlens)
    if cache_seqlens is not None and not by_int:
        options["cache_seqlens"] = cache_seqlens
    arrays = {**given, **options}
    if out is not None:
        arrays["out"] = out
    signature, memory = check_call(
        arrays,
        by_int,
        latent,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        scale=scale,
        causal=causal,
        num_splits=num_splits,
        return_lse=return_lse,
        functions=functions.fields,
        **asked,
    )
    if memory.pairs:
        check_pairs(memory, tuple(map(address, arrays.values())))
    length = signature.problem.seqlen_k
    if by_int:
        length = length_of(cache_seqlens, signature.problem)
    return Call(
        signature, given, out, options, cache_seqlens=length,
        mod_numbers=functions.numbers,
    )  # fmt: skip


def check_call(
    arrays: dict[str, Any],
    by_int: bool,
    latent: bool,
    *,
    max_seqlen_q: Any = None,
    rotary_interleaved: Any = False,
    scale: Any = None,
    causal: Any = False,
    num_splits: Any = None,
    return_lse: Any = False,
    functions: Numbers = (),
    **asked: Any,
) -> tuple[Signature, Memory]:
    """Check all but where the arrays lie, and a length that is an int.

    Parameters
    ----------
    arrays : dict
        All arrays by argument name, `out` among them, q first.
    by_int : bool
        Whether cache_seqlens is an int.
    functions : tuple of (str, object)
        `traced.Recorded.fields`; their arrays are among `arrays`, by slot.
    latent : bool
        As of `problem.KVCache`.
    **asked
        The table's numbers.
    """
    return _checked(
        describe(arrays),
        by_int,
        latent,
        None if max_seqlen_q is None
        else checks.length("max_seqlen_q", max_seqlen_q),
        checks.flag("rotary_interleaved", rotary_interleaved),
        None if scale is None else scale_of(scale),
        checks.flag("causal", causal),
        tuple([(x, _CHECKS[x](x, y)) for x, y in asked.items()])
        if asked else (),
        None if num_splits is None else splits_of(num_splits),
        checks.flag("return_lse", return_lse),
        functions,
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
    for name in INPUTS:
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


def with_values(arrays: dict[str, Any], head_dim_v: Any) -> dict[str, Any]:
    """The arrays, of a call without v_cache with the keys' first columns."""
    if "v_cache" in arrays:
        if head_dim_v is not None:
            raise ValueRangeError(
                "head_dim_v is given with v_cache, expected one of them: "
                "v_cache tells its head_dim"
            )
        return arrays
    if head_dim_v is None:
        raise ValueRangeError(
            "v_cache is None, expected an array, or head_dim_v: values are "
            "then the first head_dim_v columns of k_cache"
        )
    for name in ("v_new", "v_scale"):
        if name in arrays:
            raise ValueRangeError(
                f"{name} is given without v_cache, expected None: values are "
                "the first columns of k_cache"
            )
    k_cache = arrays["k_cache"]
    width = k_cache.shape[-1] if k_cache.ndim else 1
    columns = checks.whole("head_dim_v", head_dim_v, 1, width)
    values = {"v_cache": k_cache[..., :columns]}
    if "k_scale" in arrays:
        values["v_scale"] = arrays["k_scale"]
    return {**arrays, **values}


def are_first_columns(k: Any, v: Any, address: Callable[[Any], int]) -> bool:
    """Whether v is the memory of k's first columns."""
    return (
        k is not None
        and address(k) == address(v)
        and k.strides == v.strides
        and k.shape[:-1] == v.shape[:-1]
        and k.shape[-1:] >= v.shape[-1:]
    )


def check_new_values(are_of_keys: bool) -> None:
    """Check v_new of a call whose values are the keys' first columns."""
    if not are_of_keys:
        raise ValueRangeError(
            "v_new is given with a v_cache that is k_cache's first columns, "
            "expected None, or k_new's first columns: a value is written "
            "with its key"
        )


def check_new_scales(
    options: Mapping[str, Any], address: Callable[[Any], int]
) -> None:
    """Check v_scale of such a call: a value is stored with its key's."""
    k_scale, v_scale = options.get("k_scale"), options.get("v_scale")
    if v_scale is None:
        return
    if not are_first_columns(k_scale, v_scale, address):
        raise ValueRangeError(
            "v_scale is given with a v_cache that is k_cache's first columns, "
            "expected the same array as k_scale: a value is stored by the "
            "scale of its key"
        )


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
            f"cache_seqlens is {length}, expected {room(p, new)}"
        )
    return length


def room(p: Problem, new: int) -> str:
    """The lengths that leave room for new tokens."""
    text = (
        f"0 to {p.seqlen_k - new}: the caches hold {p.seqlen_k} tokens a "
        "sequence"
    )
    return f"{text}, and {new} are appended" if new else text


@remembered
def _checked(
    seen: tuple[tuple, ...],
    by_int: bool,
    latent: bool,
    max_seqlen_q: int | None,
    rotary_interleaved: bool,
    scale: float | None,
    causal: bool,
    asked: Numbers,
    num_splits: int | None,
    return_lse: bool,
    functions: Numbers,
) -> tuple[Signature, Memory]:
    """Check a call; nothing here depends on the data."""
    check_one_device(seen)
    by_name = {x[0]: x for x in seen}
    given = {*by_name}
    if by_int:
        given.add("cache_seqlens")
    if max_seqlen_q is not None:
        given.add("max_seqlen_q")
    _check_together(given, latent)
    arrays = CacheArrays(
        tuple(x for x in seen if x[0] in INPUTS),
        packed="cu_seqlens_q" in given,
        paged="page_table" in given,
    )
    arrays.check()
    arrays.check_caches()
    others = Others(arrays, by_name, max_seqlen_q)
    read = {x[0]: layout_of(x) for x in seen if traced.is_slot(x[0])}
    options = others.layouts | read
    rotary = None
    if "rotary_cos" in options:
        rotary = rotary_of(options["rotary_cos"], None, rotary_interleaved)
    slots, rows, *_ = arrays.full["v_cache"]
    # No length exceeds the capacity, so bounds beyond it mask nothing. But a
    # window decides by which positions queries are rotated.
    numbers_asked = dict(asked)
    causal, (left, right) = bounds_that_mask(
        causal,
        numbers_asked.get("window", (None, None)),
        others.seqlen_q,
        others.capacity,
        rotary is not None,
    )
    numbers_asked["window"] = (
        None if left is None else min(left, others.capacity),
        None if right is None else min(right, others.seqlen_q),
    )
    problem = arrays.problem(
        "kvcache",
        "q",
        "v_cache",
        batch=others.batch,
        seqlen_q=others.seqlen_q,
        seqlen_k=others.capacity,
        scale=default_scale(scale, arrays.full["q"][3], arrays.dtype),
        causal=causal,
        num_splits=num_splits,
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
            latent=latent,
        ),
        **numbers_asked,
        **dict(functions),
        **fields_of(others.of_heads),
    )
    signature = Signature(
        problem, arrays.rank, arrays.layouts(), return_lse, options
    )
    return signature, _memory_of(seen, latent)


def _memory_of(seen: tuple[tuple, ...], latent: bool) -> Memory:
    """Results and caches to which tokens are appended share no memory.

    latent : as of `problem.KVCache`: v_cache is then no other memory.
    """
    names = [name for name, *_ in seen]
    targets = ("out", *(CACHES if "k_new" in names else ()))
    apart = [
        i for i, name in enumerate(names) if not latent or name != "v_cache"
    ]
    written = [i for i in apart if names[i] in targets]
    pairs = ((i, j) for i in written for j in apart if i != j)
    return memory_of(seen, [*zip(written, written, strict=True), *pairs])


def _check_together(given: set[str], latent: bool) -> None:
    """Check the arguments that require or exclude one another."""
    partners = _PARTNERS if latent else (_KEY_NEEDS_VALUE, *_PARTNERS)
    for name, needed, why in partners:
        if name in given:
            checks.check_partner(name, needed, given, why)
    for name in ("cache_batch_idx", "cache_leftpad"):
        if {name, "page_table"} <= given:
            raise UnsupportedError(
                f"{name} is given with page_table, expected one of them: "
                "a page table tells where each token is, from the first on"
            )
