"""Requests without options, which all equal calls share.

So one look-up finds a forward call. `Request.forward` looks up each decision,
which takes as long as the rest of a call, and up to twice as long where other
code ran in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cuflash.launch import attention as execute
from cuflash.request.problem import ALIGNMENT
from cuflash.request.validate import attention as validate

from . import request as requests
from .functions import Functions
from .request import Request, Results
from .signature import by_heads, checked

# scale, causal, block_q, block_k, precision, num_splits
Numbers = tuple[Any, Any, Any, Any, Any, Any]


class PlainRequest(Request):
    """A request without options. Made by `plain_request`."""

    __slots__ = ()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_lse: Any,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> Results:
        backend: Any = requests.backend_of(q)
        if backend is None or type(return_lse) is not bool:
            return super().forward(q, k, v, return_lse)
        launched = _launched(
            self, return_lse, backend.target,
            q.shape, q.stride(), q.dtype, q.data_ptr() % ALIGNMENT, q.device,
            k.shape, k.stride(), k.dtype, k.data_ptr() % ALIGNMENT, k.device,
            v.shape, v.stride(), v.dtype, v.data_ptr() % ALIGNMENT, v.device,
        )  # fmt: skip
        if launched is None:
            return super().forward(q, k, v, return_lse)
        if self.by_heads:
            backend = backend.by_heads
        out, lse = launched.run((q, k, v), backend)
        return (out, lse) if return_lse else (out,)


@functools.lru_cache(maxsize=4096)
def _launched(
    request: Request, return_lse: bool, target: Any, *tensors: Any
) -> execute.Launched | None:
    """The call of described tensors, None if it is more than a launch."""
    described = tuple(
        (name, *tensors[5 * i : 5 * i + 5]) for i, name in enumerate("qkv")
    )
    own = ("num_splits", request.num_splits, "return_lse", return_lse)
    check = validate.forward
    if request.by_heads:
        check = by_heads(check)
    signature = checked(check, described, *request.common, *own)
    if signature.rank != 4:
        return None
    return execute.launched_forward(signature, target, target.family)


@functools.lru_cache(maxsize=4096, typed=True)
def plain_request(
    scale: Any = None,
    causal: Any = False,
    block_q: Any = None,
    block_k: Any = None,
    precision: Any = None,
    num_splits: Any = None,
    deterministic: Any = False,
    by_heads: bool = False,
) -> Request:
    """The request of calls without options."""
    return PlainRequest(
        scale, causal, block_q, block_k, precision, num_splits, deterministic,
        by_heads=by_heads,
    )  # fmt: skip


def request_of(
    numbers: Numbers,
    deterministic: Any,
    given: dict[str, Any] | None,
    functions: Functions | None,
    by_heads: bool,
    return_max_score: bool,
) -> Request:
    """The request of a call, shared if it has no options.

    `numbers` are the arguments from scale to num_splits.
    """
    if not given and functions is None and not return_max_score:
        try:
            return plain_request(*numbers, deterministic, by_heads)
        except TypeError:  # one is unhashable: the call says which
            pass
    return Request(
        *numbers, deterministic, given, functions, by_heads, return_max_score
    )
