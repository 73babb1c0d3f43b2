"""The operator of `forward_kvcache`, for compiled and traced calls."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cuflash.request.options import ARRAYS, KVCACHE, UNTRACED

from . import kvcache_request, no_gradients
from .fakes import fake_forward
from .op_gradients import below
from .ops import LIBRARY, in_schema

_OPTIONAL = (
    "k_new", "v_new", "cache_seqlens", "page_table", "cache_batch_idx",
    "cache_leftpad", "cu_seqlens_q", "rotary_cos", "rotary_sin", "k_scale",
    "v_scale", *(name for name in KVCACHE if name in ARRAYS),
)  # fmt: skip
TENSORS = ("q", "k_cache", "v_cache", *_OPTIONAL, "out")
_NUMBERS = [in_schema(x) for x in KVCACHE if x in UNTRACED and x not in ARRAYS]
# length takes the place of cache_seqlens where it is an int.
LIBRARY.define(
    "forward_kvcache(Tensor q, Tensor(a!) k_cache, "
    "Tensor(b!)? v_cache=None, "
    f"{', '.join(f'Tensor? {name}=None' for name in _OPTIONAL)}, *, "
    "SymInt? head_dim_v=None, SymInt? length=None, SymInt? max_seqlen_q=None, "
    "bool rotary_interleaved=False, float? scale=None, bool causal=False, "
    f"{', '.join(_NUMBERS)}, SymInt? num_splits=None) -> "
    "(Tensor out, Tensor lse)"
)


def call(
    tensors: dict[str, torch.Tensor],
    length: Any,
    return_lse: bool,
    window: Any = None,
    **numbers: Any,
) -> Any:
    """Call the operator; the arguments are those of `kvcache_request.run`."""
    tensors = dict(tensors)
    given_out = tensors.pop("out", None)
    if window is not None:
        numbers["window_left"], numbers["window_right"] = window
    out, lse = torch.ops.cuflash.forward_kvcache(
        **tensors, length=length, **numbers
    )
    if given_out is not None:
        out = given_out.copy_(out)
    return (out, lse) if return_lse else out


def _kernel(
    *tensors: Any,
    length: Any = None,
    window_left: Any = None,
    window_right: Any = None,
    **numbers: Any,
) -> Any:
    given = _named(tensors)
    if window_left is not None or window_right is not None:
        numbers["window"] = (window_left, window_right)
    return kvcache_request.run(given, length, True, **numbers)


def _named(tensors: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(TENSORS, tensors, strict=False)
    return {name: x for name, x in named if x is not None}


def _autograd_kernel(*tensors: Any, **numbers: Any) -> Any:
    run = functools.partial(below, "forward_kvcache", tensors, numbers)
    return no_gradients.run(_named(tensors), run)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("forward_kvcache", _kernel, _device)
LIBRARY.impl("forward_kvcache", _autograd_kernel, "Autograd")


@torch.library.register_fake("cuflash::forward_kvcache", lib=LIBRARY)
def _(
    q: Any, k_cache: Any, v_cache: Any = None, *_: Any, head_dim_v: Any = None,
    **__: Any,
) -> Any:  # fmt: skip
    values = k_cache[..., :head_dim_v] if v_cache is None else v_cache
    return fake_forward(q, values)
