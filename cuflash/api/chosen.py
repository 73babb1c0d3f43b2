"""What a call chooses, in the library of its arrays and on their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.api.arrays import on_cuda
from cuflash.request.validate import chosen as validate
from cuflash.request.validate.shapes import check_integers


def indices(
    on_host: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Indices that the host knows, in the library of q.

    Parameters
    ----------
    on_host : mapping of str to slice, sequence or ndarray
        What is chosen, of queries, keys and heads.
    arrays : mapping of str to array
        q and k, of any rank.
    """
    return {
        name: _as(
            arrays["q"],
            validate.host_indices(name, x, validate.length_of(name, arrays)),
        )
        for name, x in on_host.items()
    }


def flags(queries: Any, q: Any) -> Any:
    """One flag for each query, (seqlen_q,) or (batch, seqlen_q).

    Parameters
    ----------
    queries : slice, sequence, or array of indices or of bool
    q : array
    """
    length = validate.length_of("queries", {"q": q})
    if validate.is_on_host(queries):
        return _as(q, validate.host_flags(queries, length))
    if np.dtype(queries.dtype).kind == "b":
        validate.check_flags(queries, length)
        return queries
    check_integers("queries", queries.dtype)
    return on_cuda().flags_of(queries, length)


def _as(like: Any, x: np.ndarray) -> Any:
    """An array of the host where another array is."""
    return x if isinstance(like, np.ndarray) else on_cuda().on_device(x, like)
