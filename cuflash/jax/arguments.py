"""The arrays of a checked call, as primitives take them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuflash.request.options import INDICES
from cuflash.request.problem import Call
from cuflash.request.validate import host_values

from .checks import on_host


def equally_varying(arrays: list[Any]) -> list[Any]:
    """The arrays, marked as varying over the same axes of shard_map.

    The transpose sums gradients over the axes along which an array was
    replicated.
    """
    arrays = [jnp.asarray(x, dtype=x.dtype) for x in arrays]
    types = [jax.typeof(x) for x in arrays]
    axes = frozenset().union(*(x.mat.varying for x in types))
    return [
        jax.lax.pcast(x, tuple(axes - own), to="varying")
        if (own := kind.mat.varying) != axes
        else x
        for x, kind in zip(arrays, types, strict=True)
    ]


def with_int32(given: dict[str, Any]) -> dict[str, Any]:
    """The arrays, those of wider integers as int32.

    Raises
    ------
    ValueRangeError
        If one holds a number that does not fit, and the host may read it.
    """
    found = dict(given)
    for name, array in given.items():
        is_index = name in INDICES
        if not is_index or np.can_cast(array.dtype, np.int32):
            continue
        values = on_host(array)
        if values is not None:
            values = host_values.integers_on_host(name, values)
        is_ours = isinstance(array, jax.Array)
        found[name] = array.astype(np.int32) if is_ours else values
    return found


def check_offsets(given: dict[str, Any], call: Call) -> None:
    """Raise for offsets that are invalid, if the host may read them.

    Here, because an error of a callback comes inside one of JAX's.
    """
    p = call.problem
    for name, total, longest in (
        ("cu_seqlens_q", p.seqlen_q, p.max_seqlen_q),
        ("cu_seqlens_k", p.seqlen_k, p.max_seqlen_k),
    ):
        values = on_host(given[name])
        if values is not None:
            host_values.check_offsets(name, values.tolist(), total, longest)


def full(name: str, array: Any, rank: int) -> Any:
    """An argument with the axes that q, of a rank, may leave out."""
    if name in ("q", "k", "v"):
        missing = {4: (), 3: (0,), 2: (0, 2)}[rank]
        return jnp.expand_dims(array, missing)
    if name in ("bias", "mask"):
        return jnp.expand_dims(array, tuple(range(4 - array.ndim)))
    if name.startswith("segment_ids") and array.ndim == 1 and rank < 4:
        return array[None]
    return array
