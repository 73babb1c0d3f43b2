"""The operator of `forward_kvcache`, for compiled and traced calls."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cuflash.request.options import ARRAYS, KVCACHE, UNTRACED

from . import kvcache_request, no_gradients
from .fakes import fake_forward
from .function_ops import FUNCTIONS
from .functions import Functions, named_at
from .op_gradients import below
from .ops import LIBRARY, in_schema

_OPTIONAL = (
    "k_new", "v_new", "cache_seqlens", "page_table", "cache_batch_idx",
    "cache_leftpad", "cu_seqlens_q", "rotary_cos", "rotary_sin", "k_scale",
    "v_scale", *(name for name in KVCACHE if name in ARRAYS),
)  # fmt: skip
_FIRST = "q", "k_cache", "v_cache"
TENSORS = (*_FIRST, *_OPTIONAL, "out")
_NUMBERS = [in_schema(x) for x in KVCACHE if x in UNTRACED and x not in ARRAYS]
# length takes the place of cache_seqlens where it is an int.
_SCHEMA = (
    f"{', '.join(f'Tensor? {name}=None' for name in _OPTIONAL)}, *, "
    "SymInt? head_dim_v=None, SymInt? length=None, SymInt? max_seqlen_q=None, "
    "bool rotary_interleaved=False, float? scale=None, bool causal=False, "
    f"{', '.join(_NUMBERS)}, SymInt? num_splits=None) -> "
    "(Tensor out, Tensor lse)"
)
_CACHES = "Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache"
_NAME, _WITH_FUNCTIONS = "forward_kvcache", "function_forward_kvcache"
LIBRARY.define(f"{_NAME}({_CACHES}=None, {_SCHEMA}")
LIBRARY.define(f"{_WITH_FUNCTIONS}({_CACHES}, {FUNCTIONS}, {_SCHEMA}")


def call(
    tensors: dict[str, torch.Tensor],
    length: Any,
    return_lse: bool,
    program: tuple[Any, ...] | None = None,
    window: Any = None,
    **numbers: Any,
) -> Any:
    """Call the operator; the arguments are those of `kvcache_request.run`.

    `program`: of functions, as their operators take it.
    """
    tensors = dict(tensors)
    given_out = tensors.pop("out", None)
    if window is not None:
        numbers["window_left"], numbers["window_right"] = window
    numbers["length"] = length
    if program is None:
        out, lse = torch.ops.cuflash.forward_kvcache(**tensors, **numbers)
    else:
        first = (tensors.pop(x, None) for x in _FIRST)
        out, lse = torch.ops.cuflash.function_forward_kvcache(
            *first, *program, **tensors, **numbers
        )
    if given_out is not None:
        out = given_out.copy_(out)
    return (out, lse) if return_lse else out


def _kernel(*tensors: Any, **numbers: Any) -> Any:
    return _run(tensors, None, **numbers)


def _function_kernel(*tensors: Any, **numbers: Any) -> Any:
    tensors, program = _parted(tensors)
    return _run(tensors, Functions.of_program(*program), **numbers)


def _run(
    tensors: tuple[Any, ...],
    functions: Functions | None,
    *,
    length: Any = None,
    window_left: Any = None,
    window_right: Any = None,
    **numbers: Any,
) -> Any:
    given = _named(tensors)
    if window_left is not None or window_right is not None:
        numbers["window"] = (window_left, window_right)
    return kvcache_request.run(given, length, True, functions, **numbers)


def _parted(
    tensors: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors of a call without functions, and the functions' program."""
    first, end = len(_FIRST), len(_FIRST) + 3
    return tensors[:first] + tensors[end:], tensors[first:end]


def _named(tensors: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(TENSORS, tensors, strict=False)
    return {name: x for name, x in named if x is not None}


def _autograd_kernel(*tensors: Any, **numbers: Any) -> Any:
    run = functools.partial(below, _NAME, tensors, numbers)
    return no_gradients.run(_named(tensors), run)


def _function_autograd_kernel(*tensors: Any, **numbers: Any) -> Any:
    run = functools.partial(below, _WITH_FUNCTIONS, tensors, numbers)
    own, program = _parted(tensors)
    read = {named_at(i): x for i, x in enumerate(program[0])}
    return no_gradients.run(_named(own) | read, run)


def _fake(
    q: Any, k_cache: Any, v_cache: Any = None, *_: Any, head_dim_v: Any = None,
    **__: Any,
) -> Any:  # fmt: skip
    values = k_cache[..., :head_dim_v] if v_cache is None else v_cache
    return fake_forward(q, values)


for _name, _run_it, _autograd in (
    (_NAME, _kernel, _autograd_kernel),
    (_WITH_FUNCTIONS, _function_kernel, _function_autograd_kernel),
):
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _run_it, _device)
    LIBRARY.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"cuflash::{_name}", _fake, lib=LIBRARY)
