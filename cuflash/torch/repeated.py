"""Forward calls without options, found by one look-up.

`Request.forward` looks up each decision. That takes as long as the rest of a
call, and up to twice as long where other code ran in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cuflash.launch import attention as execute
from cuflash.request.problem import ALIGNMENT
from cuflash.request.validate import attention as validate

from . import request as requests
from .request import Request, Results
from .signature import checked


def forward(
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
) -> Results:
    """What `request.forward` returns; the request has no options."""
    backend = requests.backend_of(q)
    if backend is None:
        return request.forward(q, k, v, return_lse)
    launched = _launched(
        request, return_lse, backend.target,
        q.shape, q.stride(), q.dtype, q.data_ptr() % ALIGNMENT, q.device,
        k.shape, k.stride(), k.dtype, k.data_ptr() % ALIGNMENT, k.device,
        v.shape, v.stride(), v.dtype, v.data_ptr() % ALIGNMENT, v.device,
    )  # fmt: skip
    if launched is None:
        return request.forward(q, k, v, return_lse)
    out, lse = launched.run((q, k, v), backend)
    return (out, lse) if return_lse else (out,)


@functools.lru_cache(maxsize=4096)
def _launched(
    request: Request, return_lse: bool, target: Any, *tensors: Any
) -> execute.LaunchedForward | None:
    """The call of described tensors, None if it is more than a launch."""
    described = tuple(
        (name, *tensors[5 * i : 5 * i + 5]) for i, name in enumerate("qkv")
    )
    own = ("num_splits", request.num_splits, "return_lse", return_lse)
    signature = checked(validate.forward, described, *request.common, *own)
    if signature.rank != 4:
        return None
    return execute.launched_forward(signature, target, target.family)
