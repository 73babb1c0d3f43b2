"""Attention for JAX: under jit, grad, vmap, shard_map, scan and checkpoint.

>>> import jax, cuflash.jax
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
>>> call = jax.jit(cuflash.jax.attention, static_argnames="causal")
>>> call(q, k, v, causal=True).shape
(2, 16, 4, 8)

On a GPU the kernels run on XLA's stream, on the CPU NumPy runs, in tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash.request import hints as _hints

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError(
        "cuflash.jax needs JAX, which is not installed: "
        'pip install "cuflash[jax]" (Python 3.11 or newer)',
        name="jax",
    ) from error

try:
    from jax.experimental import buffer_callback as _buffer_callback
except ImportError as error:
    raise ImportError(
        f"cuflash.jax needs JAX 0.10 or newer, found {jax.__version__}: "
        'pip install "cuflash[jax]"',
        name="jax",
    ) from error

from .attention import attention
from .kvcache import forward_kvcache
from .merging import merge_states
from .pair_bias import attention_pair_bias, triangle_attention
from .readouts import entropy, weight_sums, weights
from .rotary import apply_rotary

del _buffer_callback

__all__ = [
    "apply_rotary",
    "attention",
    "attention_pair_bias",
    "entropy",
    "forward_kvcache",
    "merge_states",
    "triangle_attention",
    "weight_sums",
    "weights",
]


if not TYPE_CHECKING:  # mypy knows what there is

    def __getattr__(name: str) -> Any:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}"
            f"{_hints.missing('jax', name)}"
        )
