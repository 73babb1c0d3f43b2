"""The array library and the sizes for this machine."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .model import Config


def choose_device():
    """Return the array library and the sizes for this machine."""
    try:
        import cupy
    except ImportError:
        return np, Config(), "the CPU, by NumPy"
    if not cupy.is_available():
        return np, Config(), "the CPU, by NumPy"
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    # Tensor cores support bfloat16 from sm_80 on. It has float32's range, so
    # small gradients do not underflow as they would in float16.
    tensor_cores = int(device.compute_capability) >= 80
    config = Config(
        num_layers=4,
        head_dim=64,
        batch=128,
        steps=1000,
        peak_rate=2e-3,
        attention_dtype=ml_dtypes.bfloat16 if tensor_cores else np.float32,
        long_seqlens=(1024, 2048, 4096, 8192),
    )
    return cupy, config, f"{name}, by CuPy"
