"""Times of each family, beside what is known of the GPU.

Expected speeds are those that a tile table has: measured on this GPU, or on
another one of its architecture. Limits are the device's: SMs, clock, and the
multiply-adds of an SM in a clock that NVIDIA's documents name; of decoding,
the bandwidth of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import folders
from cuflash.api.attention import backward, forward
from cuflash.check import data
from cuflash.check.calls import Call, Shape
from cuflash.check.gpu import Gpu
from cuflash.plans import tiles
from cuflash.plans.plan import Device
from cuflash.plans.record import FAMILIES

SECONDS = 0.15  # of each time
# On tensor cores, on CUDA cores or in wider types, and of decoding.
FAST = Shape(4, 2048, 2048, 16, 16, 128, 128)
PLAIN = Shape(1, 2048, 2048, 8, 8, 64, 64)
DECODE = Shape(8, 1, 8192, 32, 8, 128, 128)

# Multiply-adds of an SM in a clock by compute capability. CUDA cores: the
# throughput of arithmetic instructions in the CUDA C++ Programming Guide.
# Tensor cores: the white papers of TU102, GA100, GA102, AD102 and GH100,
# dense; GeForce cards have half of it with float32 sums. What is not here is
# not known.
# By dtype for CUDA cores, else by `Family.multiplies`.
_FLOAT32 = {
    75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 100: 128, 120: 128,
}  # fmt: skip
_LIMITS = {
    "float16": _FLOAT32,
    "bfloat16": _FLOAT32,
    "float32": _FLOAT32,
    "float64": {75: 2, 80: 32, 86: 2, 87: 2, 89: 2, 90: 64, 120: 2},
    "mma_16": {75: 512, 80: 1024, 86: 512, 89: 512, 90: 2048},
    "mma_float64": {80: 64, 90: 128},
    "mma_tf32": {80: 512, 86: 256, 89: 256, 90: 1024},
}
_TF32X3 = 3  # products for one


@dataclass(frozen=True)
class Speed:
    """The time of a call of one family.

    Attributes
    ----------
    direction : str
    seconds : float
    rate : float
        TFLOP/s; of decoding GB/s.
    unit : str
    expected : float or None
        The same, measured before.
    expected_of : str
        On which GPU.
    limit : float or None
        What the device cannot exceed.
    """

    direction: str
    seconds: float
    rate: float
    unit: str
    expected: float | None
    expected_of: str
    limit: float | None


def speeds(call: Call, gpu: Gpu) -> list[Speed]:
    """The speeds of the family and dtype of a call."""
    assert call.family
    device = gpu.device()
    if FAMILIES[call.family].splits_keys:
        return [_decoding(call, gpu, device)]
    return _attending(call, gpu, device)


def _random(gpu: Gpu, call: Call, *shape: int) -> Any:
    random = np.random.default_rng(0)
    array = random.standard_normal(shape, dtype=np.float32)
    return gpu.put(array.astype(data.NUMPY[call.dtype]))


def _attending(call: Call, gpu: Gpu, device: Device) -> list[Speed]:
    record = FAMILIES[str(call.family)]
    s = FAST if record.multiplies == "mma_16" else PLAIN
    size = s.batch, s.seqlen_q, s.heads, s.head_dim
    q, k, v, dout = (_random(gpu, call, *size) for _ in range(4))
    given: Any = {"precision": "tf32x3"} if call.kind == "tf32x3" else {}
    with gpu.by(call):
        out, lse = forward(q, k, v, return_lse=True, **given)
        work: dict[str, Callable[[], Any]] = {
            "forward": lambda: forward(q, k, v, **given),
            "backward": lambda: backward(dout, q, k, v, out, lse, **given),
        }
        flops = 4 * s.batch * s.heads * s.seqlen_q * s.seqlen_k * s.head_dim
        found = []
        for direction, call_it in work.items():
            seconds = gpu.seconds(call_it, SECONDS)
            count = flops * (2.5 if direction == "backward" else 1)
            known, where = measured(call, direction, s, device)
            limit = _limit(call, device, gpu.clock())
            found.append(Speed(
                direction, seconds, count / seconds / 1e12, "TFLOP/s", known,
                where, limit,
            ))  # fmt: skip
    return found


def _decoding(call: Call, gpu: Gpu, device: Device) -> Speed:
    """One query a sequence: the time is that of reading keys and values."""
    s = DECODE
    q = _random(gpu, call, s.batch, 1, s.heads, s.head_dim)
    keys = s.batch, s.seqlen_k, s.heads_kv, s.head_dim
    k, v = (_random(gpu, call, *keys) for _ in range(2))
    with gpu.by(call):
        seconds = gpu.seconds(lambda: forward(q, k, v), SECONDS)
    rate = (k.nbytes + v.nbytes) / seconds / 1e9
    limit = float(device.bandwidth) if device.bandwidth else None
    return Speed("decoding", seconds, rate, "GB/s", None, "", limit)


def measured(
    call: Call, direction: str, s: Shape, device: Device
) -> tuple[float | None, str]:
    """TFLOP/s of the tile tables' nearest entry, and its GPU."""
    near: list[tuple[tuple[bool, bool, float], float, str]] = []
    width = data.NUMPY[call.dtype].itemsize
    for folder in (folders.tile_tables(), tiles.TABLES):
        for x in tiles.entries(folder):
            is_alike = (x.arch, x.family, x.direction, x.head_dim) == (
                device.capability, call.family, direction, s.head_dim,
            )  # fmt: skip
            if not (is_alike and x.measured) or x.causal or x.option:
                continue
            if x.dtype and data.NUMPY[x.dtype].itemsize != width:
                continue
            where = str(x.measured.get("device", ""))
            far = abs(np.log2((x.seqlen or s.seqlen_k) / s.seqlen_k))
            speed = float(x.measured.get("tflops", 0))
            other = where != device.name, x.dtype != call.dtype
            near.append(((*other, float(far)), speed, where))
    if not near:
        return None, ""
    _, speed, where = min(near)
    return speed, where


def _limit(call: Call, device: Device, clock: float | None) -> float | None:
    """TFLOP/s that the device's units allow, if they are known."""
    multiplies = FAMILIES[str(call.family)].multiplies
    table = _LIMITS[call.dtype if multiplies == "cores" else multiplies]
    rate = table.get(device.capability)
    if rate is None or clock is None:
        return None
    products = _TF32X3 if multiplies == "mma_tf32" else 1
    return 2 * rate * device.num_sms * clock / products / 1e12
