"""Runs checked `forward_kvcache` calls by kernels; see `execute`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cuflash.backends.base import Backend, Target
from cuflash.launch.attention import (
    common_fields,
    copied,
    copied_option,
    decide,
    new_or_same,
    remembered,
    rotary_fields,
)
from cuflash.launch.structs import ForwardKVCacheArguments, Template
from cuflash.plans import workspace
from cuflash.plans.append import width_of_rotated
from cuflash.plans.plan import FamilyName, Plan
from cuflash.request import layouts, options
from cuflash.request.problem import Call, KVCache, Layout, Problem, Signature

# In the struct's order.
_OPTIONS = (
    "alibi_slopes",
    "sink",
    "cache_seqlens",
    "page_table",
    "cache_batch_idx",
    "cache_leftpad",
    "cu_seqlens_q",
    "k_scale",
    "v_scale",
    "rotary_cos",
    "rotary_sin",
)
_TOKENS = ("q", "k_new", "v_new")  # of k_new and v_new any strides are read
_BUFFERS = ("split_out", "split_lse")


@dataclass(frozen=True, eq=False)
class _Recipe:
    """All decisions about the calls of one signature.

    Attributes
    ----------
    decided, loaded, template
        As in `execute.Recipe`.
    copies : mapping of str to Layout
        The arrays that kernels cannot access in place, and the layouts of
        their copies; never a cache.
    buffers : tuple of int
        Bytes of `_BUFFERS` and of the rotated queries.
    out_shape, lse_shape : tuple of int
    appends : bool
        Whether the caches are written.
    rotates : bool
        Whether attention reads rotated queries.
    """

    decided: Plan
    loaded: Any
    template: Template
    copies: Mapping[str, Layout]
    buffers: tuple[int, ...]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    appends: bool
    rotates: bool


def forward_kvcache(call: Call, backend: Backend) -> tuple[Any, Any]:
    """Run a forward_kvcache call: out in full rank and, if wanted, lse."""
    signature, out, lse = call.signature, call.out, None
    p = signature.problem
    with backend.current():
        target = backend.target
        recipe = _recipe_of(signature, target, target.family)
        if out is None:
            dtype = signature.layouts["q"].dtype
            out = backend.empty(recipe.out_shape, dtype)
        if signature.return_lse:
            lse = backend.empty(recipe.lse_shape, p.lse_dtype)
        if recipe.decided.launches:
            _launch(recipe, call, backend, out, lse)
    return out, lse


def _launch(
    recipe: _Recipe, call: Call, backend: Backend, out: Any, lse: Any
) -> None:
    written = out
    arrays = [call.options.get(name) for name in _OPTIONS]
    tokens = [call.given.get(name) for name in _TOKENS]
    if recipe.copies:
        written = new_or_same(recipe.copies.get("out"), out, backend)
        for i, name in enumerate(_OPTIONS):
            if name in recipe.copies:
                arrays[i] = copied_option(
                    recipe.copies[name], arrays[i], backend
                )
        for i, name in enumerate(_TOKENS):
            if name in recipe.copies:
                tokens[i] = copied(
                    recipe.copies[name], call.arrays[name], backend
                )
    # Kept alive until the kernels are queued, as are the copies.
    _kept, buffers = backend.workspace(recipe.buffers)
    given = backend.address(arrays)
    q, k_new, v_new = backend.address(tokens)
    caches = [call.given["k_cache"], call.given["v_cache"]]
    addresses = (
        *given, q, k_new, v_new, call.cache_seqlens, *buffers[:2],
        buffers[2] if recipe.rotates else q,
        *backend.address(caches, written=recipe.appends),
        *backend.address([written, lse], written=True),
    )  # fmt: skip
    arguments = recipe.template.fill((), addresses)
    backend.launch(recipe.loaded, arguments, recipe.template.kind)
    if written is not out:
        backend.copy(out, written)


# ---- Recipes ----


@remembered
def _recipe_of(
    signature: Signature, target: Target, family: FamilyName | None
) -> _Recipe:
    p, given = _with_alignment(signature), dict(signature.layouts)
    cache = p.kvcache
    assert cache is not None
    out_shape = (*given["q"].shape[:3], p.head_dim_v)
    given.setdefault("out", layouts.new(out_shape, given["q"].dtype))
    decided = decide(p, target, family)
    taken = _taken(given, decided, cache)
    read = options.as_read(signature)
    row_strides = {"q": taken["q"], "out": taken["out"]}
    if cache.rotary:
        width = width_of_rotated(p)
        row_strides["q"] = layouts.new(
            given["q"].shape, given["q"].dtype, width
        )
    constants = {
        **layouts.row_strides(
            {**row_strides, "k": given["k_cache"], "v": given["v_cache"]}
        ),
        **common_fields(p, decided),
        "num_splits": decided.num_splits,
        "options": options.numbers(
            signature,
            {x: read[x] for x in ("alibi_slopes", "sink") if x in read},
        ),
        "cache": _numbers(p, cache, taken, read),
    }
    return _Recipe(
        decided,
        target.load(decided),
        Template(ForwardKVCacheArguments, **constants),
        layouts.changes(given, taken)
        | layouts.changes(signature.options, read),
        workspace.sizes(decided.workspace, (*_BUFFERS, "rotated")),
        out_shape,
        (out_shape[0], out_shape[2], out_shape[1]),
        cache.seqlen_new > 0,
        cache.rotary is not None,
    )


def _with_alignment(signature: Signature) -> Problem:
    """The problem, with the alignment of the caches' rows."""
    p = signature.problem
    assert p.kvcache is not None
    alignment = min(
        layouts.row_alignment(signature.layouts[name])
        for name in ("k_cache", "v_cache")
    )
    return replace(p, kvcache=replace(p.kvcache, alignment=alignment))


def _taken(
    given: Mapping[str, Layout], decided: Plan, cache: KVCache
) -> dict[str, Layout]:
    """The layouts in which kernels access the arrays."""
    taken = dict(given)
    for name in _TOKENS:
        if name in given and (name != "q" or cache.rotary):
            taken[name] = layouts.by_any_element(given[name])
    if not cache.rotary:
        taken["q"] = decided.record.readable(given["q"])
    taken["out"] = layouts.writable(given["out"], by_tma=False)
    return taken


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
