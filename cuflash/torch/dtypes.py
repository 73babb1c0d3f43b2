"""torch's dtypes and NumPy's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_NAMES = (
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "bool",
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "complex64", "complex128",
)  # fmt: skip

# By name, NumPy knows its own dtypes only.
NUMPY = {
    getattr(torch, name): np.dtype(getattr(ml_dtypes, name, name))
    for name in _NAMES
}
# Keyed by dtypes and by their names: a lookup takes less time than np.dtype.
TORCH: dict[Any, torch.dtype] = {
    key: theirs for theirs, ours in NUMPY.items() for key in (ours, ours.name)
}

# NumPy has no dtypes for these: their bytes are passed on.
_AS_BYTES = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy array that shares the memory of a CPU tensor."""
    tensor = tensor.detach()
    raw = _AS_BYTES.get(tensor.dtype)
    if raw is None:
        return tensor.numpy()
    return tensor.view(raw).numpy().view(NUMPY[tensor.dtype])


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A contiguous CPU tensor of a NumPy array, without a copy if it can."""
    array = np.ascontiguousarray(array)
    dtype = TORCH[array.dtype]
    raw = _AS_BYTES.get(dtype)
    if raw is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(NUMPY[raw])).view(dtype)
