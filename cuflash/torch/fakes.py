"""The operators' fake kernels: results without numbers, for compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuflash.request.options import DIFFERENTIABLE

from .inductor import register_lowerings
from .ops import LIBRARY, NUM_SAVED


def fake_forward(q: Any, v: Any) -> Any:
    """out and lse."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    heads_first = (*q.shape[:-3], *q.shape[-2:-4:-1])
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return out, q.new_empty(heads_first, dtype=wide)


def _fake(q: Any, k: Any, v: Any, *_: Any, **numbers: Any) -> Any:
    register_lowerings()
    return fake_forward(q, v)


def _fake_plain_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, *_: Any, **numbers: Any
) -> Any:
    register_lowerings()
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _fake_backward(*tensors: Any, **numbers: Any) -> Any:
    others = zip(DIFFERENTIABLE, tensors[NUM_SAVED:], strict=False)
    given = {**numbers, **dict(others)}
    dq, dk, dv = _fake_plain_backward(*tensors)
    return dq, dk, dv, *(
        given[x].new_empty(given[x].shape) if given.get(f"return_d{x}")
        else dq.new_empty(0) for x in DIFFERENTIABLE
    )  # fmt: skip


def _fake_seed(number: int, *, device: Any) -> Any:
    return torch.empty((), dtype=torch.int64, device=device)


_FAKES: dict[str, Callable[..., Any]] = {
    "attention": _fake,
    "attention_backward": _fake_backward,
    "plain_attention": _fake,
    "plain_attention_backward": _fake_plain_backward,
    "new_seed": _fake_seed,
}
for _name, _kernel in _FAKES.items():
    torch.library.register_fake(f"cuflash::{_name}", _kernel, lib=LIBRARY)
