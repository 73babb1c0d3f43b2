"""torch's dtypes and NumPy's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_PAIRS = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}

NUMPY = _PAIRS
# Keyed by dtypes and by their names: a lookup takes less time than np.dtype.
TORCH: dict[Any, torch.dtype] = {
    key: theirs for theirs, ours in _PAIRS.items() for key in (ours, ours.name)
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
