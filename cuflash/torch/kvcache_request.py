"""A `forward_kvcache` call on real tensors."""

from __future__ import annotations

from typing import Any

import torch

from cuflash.api import kvcache as api_kvcache
from cuflash.launch import kvcache as execute_kvcache
from cuflash.request import traced
from cuflash.request.problem import Call, Signature, strip, strip_lse
from cuflash.request.validate import kvcache as validate_kvcache
from cuflash.request.validate import kvcache_values, memory

from . import request
from .dtypes import from_numpy, to_numpy
from .functions import Functions
from .request import reads_values
from .signature import Shown, check_devices, checked, describe

_INPUTS = ("q", "k_cache", "v_cache", "k_new", "v_new")


def run(
    tensors: dict[str, torch.Tensor],
    length: Any,
    return_lse: Any,
    functions: Functions | None = None,
    **numbers: Any,
) -> Any:
    """Out, and lse if wanted.

    Parameters
    ----------
    tensors : dict
        The tensors that are given, by the names of their arguments.
    length : int or None
        cache_seqlens, if it is one number.
    functions : Functions or None
    return_lse, **numbers
        The other arguments.
    """
    q = tensors["q"]
    backend = request.backend_of(q)
    out, numbers["return_lse"] = tensors.get("out"), return_lse
    if backend is None:
        result = _on_cpu(tensors, length, numbers, functions)
    else:
        call = _call(tensors, length, numbers, functions)
        result, lse = execute_kvcache.forward_kvcache(call, backend)
        if call.rank != 4:
            result = strip(result, call.rank)
            lse = strip_lse(lse, call.rank)
        if return_lse:
            result = (result, lse)
    written = ["k_cache", "v_cache"] if "k_new" in tensors else []
    for name in [*written, "out"] if out is not None else written:
        if name in tensors and not tensors[name].is_inference():
            torch.autograd.graph.increment_version(tensors[name])
    if out is not None:
        return (out, result[1]) if return_lse else out
    return result


def _call(
    tensors: dict[str, torch.Tensor],
    length: Any,
    numbers: dict[str, Any],
    functions: Functions | None,
) -> Call:
    columns = numbers.pop("head_dim_v", None)
    tensors = validate_kvcache.with_values(tensors, columns)
    latent = _are_first_columns(tensors["k_cache"], tensors["v_cache"])
    if latent and "v_new" in tensors:
        are_same = "k_new" in tensors and _are_first_columns(
            tensors["k_new"], tensors["v_new"]
        )
        validate_kvcache.check_new_values(are_same)
        tensors = {x: y for x, y in tensors.items() if x != "v_new"}
    mod_numbers: tuple[Any, ...] = ()
    if functions is not None:
        tensors = {**tensors, **functions.readable_arrays()}
        numbers = {**numbers, **functions.in_key()}
        mod_numbers = tuple(functions.numbers.values())
    described = [describe(name, x) for name, x in tensors.items()]
    values = (x for item in numbers.items() for x in item)
    if functions is not None:
        tensors = traced.by_slots(tensors)
    signature, places = checked(
        _check, tuple(described), "by_int", length is not None,
        "latent", latent, *values,
    )  # fmt: skip
    if places.pairs:
        starts = tuple([x.data_ptr() for x in tensors.values()])
        memory.check_pairs(places, starts)
    before = signature.problem.seqlen_k
    if length is not None:
        before = validate_kvcache.length_of(length, signature.problem)
    given = {name: tensors[name] for name in _INPUTS if name in tensors}
    others = {name: tensors[name] for name in signature.options}
    call = Call(
        signature, given, tensors.get("out"), others, 0, before,
        mod_numbers=mod_numbers,
    )  # fmt: skip
    if reads_values():
        on_host = {name: to_numpy(x.cpu()) for name, x in others.items()}
        kvcache_values.values(Call(signature, given, None, on_host, 0, before))
    return call


def _are_first_columns(k: torch.Tensor, v: torch.Tensor) -> bool:
    """As `validate_kvcache.are_first_columns`, of tensors."""
    return (
        k.data_ptr() == v.data_ptr()
        and k.stride() == v.stride()
        and k.shape[:-1] == v.shape[:-1]
        and k.shape[-1:] >= v.shape[-1:]
    )


def _check(
    by_int: bool, latent: bool, **arguments: Any
) -> tuple[Signature, memory.Memory]:
    functions = traced.taken(arguments)
    arrays = {n: x for n, x in arguments.items() if isinstance(x, Shown)}
    others = {n: x for n, x in arguments.items() if n not in arrays}
    return validate_kvcache.check_call(
        arrays, by_int, latent, functions=functions.fields, **others
    )


def _on_cpu(
    tensors: dict[str, torch.Tensor],
    length: Any,
    numbers: dict[str, Any],
    functions: Functions | None,
) -> Any:
    check_devices({name: x.device for name, x in tensors.items()})
    arrays: dict[str, Any] = {name: to_numpy(x) for name, x in tensors.items()}
    if length is not None:
        arrays["cache_seqlens"] = length
    if functions is not None:
        found = functions.readable_arrays()
        read = {n: to_numpy(x) for n, x in found.items()}
        numbers |= functions.as_options(read)
    result = api_kvcache.forward_kvcache(**arrays, **numbers)
    if isinstance(result, tuple):
        return tuple(map(from_numpy, result))
    return from_numpy(result)
