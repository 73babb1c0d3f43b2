"""Exact attention and its gradients for CuPy and NumPy arrays.

>>> import numpy as np
>>> import cuflash
>>> shape = 2, 16, 4, 8  # batch, seqlen, heads, head_dim
>>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, *shape))
>>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
>>> dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse, causal=True)

`forward`, `backward`, `forward_kvcache`, `merge_states`, `apply_rotary`, and
`jvp` and `double_backward`, the derivatives of `forward` and `backward`, run
on the device that holds their arrays: on a GPU by CUDA kernels compiled at run
time, on the CPU by NumPy, in tiles. `cuflash.reference` states every equation
and computes, in float64, what those tiles do not take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _checkout
from . import emulator as emulator  # a public module
from ._version import __version__
from .api import (
    apply_rotary,
    backward,
    forward,
    forward_kvcache,
    merge_states,
)
from .api_derivatives import double_backward, jvp
from .build import warmup
from .errors import (
    CompileError,
    CuflashError,
    DTypeError,
    GroupError,
    KernelFault,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)

__all__ = [
    "CompileError",
    "CuflashError",
    "DTypeError",
    "GroupError",
    "KernelFault",
    "ShapeError",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "apply_rotary",
    "backward",
    "double_backward",
    "forward",
    "forward_kvcache",
    "jvp",
    "merge_states",
]


if TYPE_CHECKING:
    from . import reference as reference


def __getattr__(name: str) -> Any:
    # Imported on first use: the reference imports SciPy, which takes longer
    # than the rest of cuflash.
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
