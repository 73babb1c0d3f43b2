"""The operators' kernels as torch's Inductor calls them (`inductor.py`).

The dispatcher is left out, which takes as long as half of a call, and so is
lse where compiled code drops it. Profilers and dispatch modes, which see
operators only, get operators; so does forward mode, which they refuse.

Compiled code outlives this version of cuflash in caches on disk: a function
here keeps its name, arguments and results. One that changes gets a new name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd import forward_ad

from . import ops
from .ops import OPERATORS
from .repeated import plain_request

# Where compiled code finds this module.
NAME = "torch.ops.cuflash.direct"
setattr(OPERATORS, "direct", sys.modules[__name__])  # noqa: B010

# Whether a profiler records operators, and how many modes are told of them.
_is_profiled = torch.autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack


def _is_watched() -> bool:
    """Whether these, or forward mode, have to see operators."""
    return _is_profiled() or _modes() > 0 or forward_ad._current_level >= 0


def attention(q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any) -> Any:
    """out and lse."""
    if _is_watched():
        return OPERATORS.attention(q, k, v, *tensors, **numbers)
    return ops.run(q, k, v, *tensors, **numbers)


def attention_out(
    q: Any, k: Any, v: Any, *tensors: Any, **numbers: Any
) -> Any:
    """out, alone in a tuple."""
    if _is_watched():
        return OPERATORS.attention(q, k, v, *tensors, **numbers)[:1]
    return ops.request(tensors, numbers).forward(q, k, v, False)


def attention_backward(*tensors: Any, **numbers: Any) -> Any:
    """The gradients of q, k, v and the options that have them."""
    if _is_watched():
        return OPERATORS.attention_backward(*tensors, **numbers)
    return ops.run_backward(*tensors, **numbers)


def plain_attention(q: Any, k: Any, v: Any, **numbers: Any) -> Any:
    """out and lse of a call without options."""
    if _is_watched():
        return OPERATORS.plain_attention(q, k, v, **numbers)
    return plain_request(**numbers).forward(q, k, v, True)


def plain_attention_out(q: Any, k: Any, v: Any, **numbers: Any) -> Any:
    """out of a call without options, alone in a tuple."""
    if _is_watched():
        return OPERATORS.plain_attention(q, k, v, **numbers)[:1]
    return plain_request(**numbers).forward(q, k, v, False)


def plain_attention_backward(*tensors: Any, **numbers: Any) -> Any:
    """The gradients of q, k and v."""
    if _is_watched():
        return OPERATORS.plain_attention_backward(*tensors, **numbers)
    return ops.run_plain_backward(*tensors, **numbers)
