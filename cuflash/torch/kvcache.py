"""`forward_kvcache` on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch

from cuflash.api import foreign_names
from cuflash.api.kvcache import forward_kvcache as of_arrays
from cuflash.api.tile_mask import function_of
from cuflash.errors import UnsupportedError
from cuflash.request.options import TRACED, split
from cuflash.request.problem import strip, strip_lse
from cuflash.request.validate import kvcache as validate_kvcache

from . import (
    autocast,
    compiled_functions,
    functions,
    kvcache_ops,
    no_gradients,
)
from .checks import check_no_tangents, check_tensors
from .functions import Functions
from .kvcache_ops import TENSORS
from .kvcache_request import run
from .tracing import (
    TRANSFORMED,
    is_traced,
    is_transformed,
    refuse_transforms,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuflash.api.types import TorchCacheOptions

    from .types import Results

_NAME = "cuflash.torch.forward_kvcache"
_NO_GRADIENTS = "attention over caches has no gradients"


@overload
def forward_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[TorchCacheOptions],
) -> torch.Tensor: ...
@overload
def forward_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[TorchCacheOptions],
) -> Results: ...
@overload
def forward_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[TorchCacheOptions],
) -> torch.Tensor | Results: ...
@foreign_names.our_names(_NAME, like=of_arrays, array="torch.Tensor | None")
def forward_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None = None,
    *positional: NoReturn,
    cache_seqlens: int | torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | Results:
    """Attention over a cache of keys and values, of torch tensors.

    New tokens, if any, are appended to the caches in place. It has no
    gradients: inputs may require grad, but a backward pass that comes to it
    raises.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, num_heads_q, head_dim)
        On a CUDA device or the CPU.
    k_cache, v_cache : Tensor, (batch, capacity, num_heads_kv, head_dim)
        In the dtype of `q`, or float8_e4m3fn, or its bytes as uint8. With
        `page_table`, (num_pages, page_size, num_heads_kv, head_dim). Without
        `v_cache`, values are the first `head_dim_v` columns of keys.
    cache_seqlens, return_lse, **options
        As for `cuflash.forward_kvcache`, with tensors for arrays. `score_mod`
        and `mask_mod` may read tensors from outside, too.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, num_heads_q, head_dim_v)
    lse : Tensor, (batch, num_heads_q, seqlen_q)
        Only with `return_lse`.

    Raises
    ------
    CuflashError
        In the same cases as `cuflash.forward_kvcache`.
    UnsupportedError
        If a tensor that is written to requires grad where gradients are
        enabled. In the backward pass, if it needs a gradient of this call.

    See Also
    --------
    cuflash.forward_kvcache : the same for CuPy and NumPy arrays; explains
        every argument.

    Notes
    -----
    Under autocast `q`, `k_new` and `v_new` take its dtype; the caches have
    to have it already.

    Examples
    --------
    >>> import torch
    >>> import cuflash.torch
    >>> q, k_new, v_new = torch.randn(3, 1, 1, 4, 8)
    >>> k_cache, v_cache = torch.zeros(2, 1, 32, 4, 8)
    >>> out = cuflash.torch.forward_kvcache(
    ...     q, k_cache, v_cache, k_new=k_new, v_new=v_new, cache_seqlens=0
    ... )
    >>> torch.allclose(out, v_new)
    True
    """
    if options or positional:
        foreign_names.refuse(_NAME, options, positional)
    if not torch.compiler.is_compiling():
        cache_seqlens = validate_kvcache.length_or_array(cache_seqlens)
    elif is_transformed(True):
        torch._dynamo.graph_break(msg=TRANSFORMED)
    length = None
    if validate_kvcache.is_int(cache_seqlens):
        length, cache_seqlens = cache_seqlens, None
    given = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": cache_seqlens,
        **options,
    }
    tensors = {x: given[x] for x in TENSORS if given.get(x) is not None}
    others = {name: x for name, x in options.items() if name not in TENSORS}
    own, numbers = _functions(others, q)
    rank, out = getattr(q, "ndim", 4), options.get("out")
    is_packed = "cu_seqlens_q" in tensors
    if not torch.compiler.is_compiling():
        check_tensors(tensors)
        inputs = tensors if own is None else tensors | own.arrays
        check_no_tangents(inputs, _NO_GRADIENTS)
        refuse_transforms()
        tensors = _as_in_memory(tensors)
    if autocast.is_on(q):
        for name in ("k_cache", "v_cache"):
            if name in tensors:
                autocast.check_cache(name, tensors[name])
        for name in ("q", "k_new", "v_new"):
            if name in tensors:
                tensors[name] = autocast.to_its_dtype(name, tensors[name])
    tensors = validate_kvcache.with_batch(tensors)
    q, k_cache = tensors["q"], tensors["k_cache"]
    if is_traced(q, k_cache, tensors.get("v_cache", k_cache)):
        program = own.as_program() if isinstance(own, Functions) else own
        result = kvcache_ops.call(
            tensors, length, return_lse, program, **numbers
        )
    else:
        result = no_gradients.run(
            tensors if own is None else tensors | own.arrays,
            lambda: run(tensors, length, return_lse, own, **numbers),
        )
    if rank not in (2, 3) or is_packed:
        return result
    found, lse = result if return_lse else (result, None)
    found = strip(found, rank) if out is None else out
    return (found, strip_lse(lse, rank)) if return_lse else found


def _functions(
    others: dict[str, Any], q: torch.Tensor
) -> tuple[Any, dict[str, Any]]:
    """The functions of a call, or their program, and its other arguments."""
    if TRACED.isdisjoint(others):
        return None, others
    theirs = {x: y for x, y in others.items() if x in TRACED}
    asked, arrays = split(function_of(theirs))
    compiling = torch.compiler.is_compiling()
    taken = compiled_functions.taken if compiling else functions.taken
    found = taken(asked, arrays, q)
    return found, {x: y for x, y in others.items() if x not in TRACED}


def _as_in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of views that negate; UnsupportedError if one is written to."""
    negated = [name for name, x in tensors.items() if x.is_neg()]
    if not negated:
        return tensors
    written = {"out", *(("k_cache", "v_cache") if "k_new" in tensors else ())}
    for name in negated:
        if name in written:
            raise UnsupportedError(
                f"{name} is a view that negates what is in memory, expected "
                "one of the numbers themselves: it is written in place (pass "
                f"{name}.resolve_neg())"
            )
    return {name: x.resolve_neg() for name, x in tensors.items()}
