"""Exact attention and its gradients for CuPy and NumPy arrays.

>>> out, lse = cuflash.forward(q, k, v, causal=True, return_lse=True)
>>> dq, dk, dv = cuflash.backward(dout, q, k, v, out, lse, causal=True)

`forward`, `backward` and `merge_states` run on the device that holds their
arrays: on a GPU by CUDA kernels compiled at run time, on the CPU by the NumPy
reference, `cuflash.reference`.
"""

from __future__ import annotations

from . import compiler
from . import emulator as emulator  # public, and no call
from .api import backward, forward, merge_states
from .errors import (
    CompileError,
    CuflashError,
    DTypeError,
    KernelFault,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)

__all__ = [
    "CompileError",
    "CuflashError",
    "DTypeError",
    "KernelFault",
    "ShapeError",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "backward",
    "forward",
    "merge_states",
]


def __getattr__(name: str) -> str:
    # setup.cfg owns the version; reading it takes longer than the import.
    if name == "__version__":
        from importlib.metadata import version

        return version("cuflash")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


compiler.start_default_compiles()
