"""Exact attention and its gradients for CuPy and NumPy arrays.

>>> import numpy as np
>>> import cuflash
>>> shape = 2, 16, 4, 8  # batch, seqlen, heads, head_dim
>>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, *shape))
>>> out, vjp = cuflash.vjp(q, k, v, causal=True)
>>> dq, dk, dv = vjp(dout)

`forward`, `backward`, `vjp` (both in one), `forward_kvcache`, `merge_states`,
`apply_rotary`, `jvp` and `double_backward`, the derivatives of `forward` and
`backward`, and `weights`, `weight_sums` and `entropy`, which read numbers
inside the softmax, run on the device that holds their arrays: on a GPU by CUDA
kernels compiled at run time, on the CPU by NumPy, in tiles.
`cuflash.reference` states every equation and computes, in float64, what those
tiles do not take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash import _checkout
from cuflash import emulator as emulator  # a public module
from cuflash._version import __version__
from cuflash.api.attention import backward, forward
from cuflash.api.builders import cu_seqlens, rotary_tables, segment_ids
from cuflash.api.derivatives import double_backward, jvp
from cuflash.api.kvcache import forward_kvcache
from cuflash.api.merging import merge_states
from cuflash.api.readout import entropy, weight_sums, weights
from cuflash.api.readout_gradients import (
    entropy_backward,
    weight_sums_backward,
    weights_backward,
)
from cuflash.api.rotary import apply_rotary
from cuflash.api.tile_mask import TileMask, tile_mask
from cuflash.api.vjp import vjp
from cuflash.errors import (
    CompileError,
    CuflashError,
    DTypeError,
    ExpressionError,
    GroupError,
    KernelFault,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)

from .build import warmup

__all__ = [
    "CompileError",
    "CuflashError",
    "DTypeError",
    "ExpressionError",
    "GroupError",
    "KernelFault",
    "ShapeError",
    "TileMask",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "apply_rotary",
    "backward",
    "cu_seqlens",
    "double_backward",
    "entropy",
    "entropy_backward",
    "forward",
    "forward_kvcache",
    "jvp",
    "merge_states",
    "rotary_tables",
    "segment_ids",
    "tile_mask",
    "vjp",
    "weight_sums",
    "weight_sums_backward",
    "weights",
    "weights_backward",
]


if TYPE_CHECKING:
    from cuflash import reference as reference


def __getattr__(name: str) -> Any:
    # Imported on first use: 31 modules that few programs need.
    if name == "reference":
        import cuflash.reference

        return cuflash.reference
    advice = ""
    if name in ("torch", "jax", "flash_attn", "distributed"):
        advice = f": write `import cuflash.{name}` first"
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}{advice}"
    )


def __dir__() -> list[str]:
    return [*globals(), "reference"]


_checkout.find_reference()
warmup.start_default_compiles()
