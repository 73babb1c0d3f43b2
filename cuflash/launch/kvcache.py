"""Runs checked `forward_kvcache` calls by kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cuflash.backends.base import Backend, Target
from cuflash.launch.recipe import (
    Recipe,
    decide,
    layouts_of,
    recipe_of,
    remembered,
)
from cuflash.launch.rows import rotary_fields
from cuflash.launch.run import run
from cuflash.plans.append import width_of_rotated
from cuflash.plans.plan import FamilyName
from cuflash.request import layouts, options
from cuflash.request.problem import Call, KVCache, Layout, Problem, Signature


def forward_kvcache(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a forward_kvcache call: out in full rank and, if wanted, lse."""
    signature, out, lse, given = call.signature, call.out, None, call.given
    p, layout, target = (
        signature.problem, signature.layouts["q"], backend.target
    )  # fmt: skip
    batch, seqlen_q, heads, _ = layout.shape
    with backend.current():
        recipe = _recipe(signature, target, target.family)
        if out is None:
            shape = batch, seqlen_q, heads, p.head_dim_v
            out = backend.empty(shape, layout.dtype)
        if signature.return_lse:
            lse = backend.empty((batch, heads, seqlen_q), p.lse_dtype)
        if recipe.decided.launches:
            run(recipe, call, backend, {
                "out": out, "lse": lse,
                "k": given["k_cache"], "v": given["v_cache"],
            })  # fmt: skip
    return out, lse


@remembered
def _recipe(
    signature: Signature, target: Target, family: FamilyName | None
) -> Recipe:
    p = _with_alignment(signature)
    cache = p.kvcache
    assert cache is not None
    q = signature.layouts["q"]
    given = layouts_of(signature, {"out": (*q.shape[:3], p.head_dim_v)})
    decided = decide(p, target, family)
    taken = {"out": layouts.writable(given["out"])}
    rows = {"k": given["k_cache"], "v": given["v_cache"], **taken}
    for name in _TOKENS:  # of k_new and v_new any strides are read
        if name in given:
            taken[name] = layouts.by_any_element(given[name])
    if cache.rotary:
        rows["q"] = layouts.new(q.shape, q.dtype, width_of_rotated(p))
    else:
        rows["q"] = taken["q"] = decided.record.readable(q)
    return recipe_of(
        signature,
        target,
        decided,
        given,
        taken,
        ("out", "lse", *_written(cache)),
        {
            **layouts.row_strides(rows),
            "cache": _numbers(p, cache, taken, options.as_read(signature)),
        },
        sources=_sources(cache),
    )


def _sources(cache: KVCache) -> dict[str, str]:
    """The arrays to which pointers of other names lead."""
    found = {"q": "rotated"} if cache.rotary else {}
    if cache.latent:
        found["v"] = "k" if _written(cache) else "k_cache"
    return found


_TOKENS = "q", "k_new", "v_new"


def _written(cache: KVCache) -> tuple[str, ...]:
    """The caches to which tokens are appended, each memory once."""
    if not cache.seqlen_new:
        return ()
    return ("k",) if cache.latent else ("k", "v")


def _with_alignment(signature: Signature) -> Problem:
    """The problem, with the alignment of the caches' rows."""
    p = signature.problem
    assert p.kvcache is not None
    alignment = min(
        layouts.row_alignment(signature.layouts[name])
        for name in ("k_cache", "v_cache")
    )
    return replace(p, kvcache=replace(p.kvcache, alignment=alignment))


def _numbers(
    p: Problem,
    cache: KVCache,
    taken: Mapping[str, Layout],
    read: Mapping[str, Layout],
) -> dict[str, Any]:
    """The fields of KVCacheNumbers; those that are left out are 0."""
    strides = {
        "rotary_cos": "cos_stride",
        "rotary_sin": "sin_stride",
        "page_table": "page_table_stride",
        "k_scale": "k_scale_stride",
        "v_scale": "v_scale_stride",
        "cache_seqlens": "cache_seqlens_stride",
        "cu_seqlens_q": "cu_seqlens_stride",
        "cache_batch_idx": "batch_idx_stride",
        "cache_leftpad": "leftpad_stride",
    }
    numbers: dict[str, Any] = {
        "capacity": p.seqlen_k,
        "num_slots": cache.slots,
        "seqlen_new": cache.seqlen_new,
        "total_q": cache.total_q,
    }
    for name in _TOKENS:
        if name in taken:
            numbers[f"{name}_stride"] = layouts.element_strides(taken[name])
    for name, field in strides.items():
        if name in read:
            own = layouts.element_strides(read[name])
            numbers[field] = own if len(own) > 1 else own[0]
    if cache.rotary:
        numbers |= rotary_fields(cache.rotary)
    return numbers
