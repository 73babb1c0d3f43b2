"""cuflash for PyTorch tensors: differentiable, compiled, on torch's stream.

>>> import torch
>>> import cuflash.torch
>>> q, k, v = torch.randn(3, 2, 16, 4, 8, requires_grad=True)
>>> cuflash.torch.attention(q, k, v, causal=True).sum().backward()

Importing this package imports PyTorch; the rest of cuflash does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash.request import hints as _hints

try:
    import torch as _torch  # noqa: F401  the library: imports are absolute
except ImportError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "cuflash.torch needs PyTorch, which could not be imported: "
        'pip install "cuflash[torch]"',
        name="torch",
    ) from error

from . import fakes as _fakes  # noqa: F401  registers fake kernels
from . import function_ops as _function_ops  # noqa: F401  of functions
from . import op_gradients as _op_gradients  # noqa: F401  and gradients
from .attention import attention
from .block_mask import BlockMask, create_block_mask
from .flex import flex_attention
from .group_attention import distributed_attention
from .kvcache import forward_kvcache
from .merging import merge_states
from .pair_bias import attention_pair_bias, triangle_attention
from .readouts import entropy, weight_sums, weights
from .registration import register_transformers
from .rotary import apply_rotary
from .sdpa import scaled_dot_product_attention

__all__ = [
    "BlockMask",
    "apply_rotary",
    "attention",
    "attention_pair_bias",
    "create_block_mask",
    "distributed_attention",
    "entropy",
    "flex_attention",
    "forward_kvcache",
    "merge_states",
    "register_transformers",
    "scaled_dot_product_attention",
    "triangle_attention",
    "weight_sums",
    "weights",
]


if not TYPE_CHECKING:  # mypy knows what there is

    def __getattr__(name: str) -> Any:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}"
            f"{_hints.missing('torch', name)}"
        )
