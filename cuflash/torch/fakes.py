"""The operators' fake kernels: results without numbers, for compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuflash.request.options import DIFFERENTIABLE

from .inductor import register_lowerings
from .ops import LIBRARY


def _fake(q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any) -> Any:
    register_lowerings()
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    heads_first = (*q.shape[:-3], *q.shape[-2:-4:-1])
    return out, q.new_empty(heads_first, dtype=lse_dtype(q.dtype))


def _fake_plain_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, *_: Any, **numbers: Any
) -> Any:
    register_lowerings()
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _fake_backward(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *tensors: Any,
    **numbers: Any,
) -> Any:
    given = {**numbers, **dict(zip(DIFFERENTIABLE, tensors, strict=False))}
    return (
        *_fake_plain_backward(dout, dlse, q, k, v),
        *(given[x].new_empty(given[x].shape) if given.get(f"return_d{x}")
          else q.new_empty(0) for x in DIFFERENTIABLE),
    )  # fmt: skip


def _fake_seed(number: int, *, device: Any) -> Any:
    return torch.empty((), dtype=torch.int64, device=device)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse."""
    return torch.float64 if dtype is torch.float64 else torch.float32


_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake,
    "attention_backward": _fake_backward,
    "plain_attention": _fake,
    "plain_attention_backward": _fake_plain_backward,
    "new_seed": _fake_seed,
}
for _name, _kernel in _FAKES.items():
    torch.library.register_fake(f"cuflash::{_name}", _kernel, lib=LIBRARY)
