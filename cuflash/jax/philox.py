"""Which pairs dropout keeps, by XLA: Philox4x32-10, as in the kernels.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2,
3", doi:10.1145/2063384.2063405. `cuflash.reference.dropout` explains it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def kept(
    probability: float, seed: Any, batch: Any, head: Any, query: Any, key: Any
) -> Any:
    """Whether a pair is kept; the indices broadcast to the pairs."""
    counter = [x.astype(jnp.uint32) for x in (key // 4, query, head, batch)]
    words = _words(counter, _key_of(seed))
    number = key % 4
    word = jnp.select([number == i for i in range(4)], words)
    return word >= np.uint32(int(probability * 2.0**32))


def _key_of(seed: Any) -> tuple[Any, Any]:
    """The two words of a seed, which counts modulo 2^64."""
    if isinstance(seed, int):
        return jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32)
    if seed.dtype.itemsize == 8:
        return seed.astype(jnp.uint32), (seed >> 32).astype(jnp.uint32)
    high = jnp.where(seed < 0, np.uint32(0xFFFFFFFF), np.uint32(0))
    return seed.astype(jnp.uint32), high


def _words(counter: list[Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(10):
        if i:
            k0 = k0 + np.uint32(_KEY_STEPS[0])
            k1 = k1 + np.uint32(_KEY_STEPS[1])
        a_high, a_low = _product(c0, _MULTIPLIERS[0])
        b_high, b_low = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
    return c0, c1, c2, c3


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """The upper and the lower 32 bits; sums of halves do not overflow."""
    x_high, x_low = x >> 16, x & 0xFFFF
    high, low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    first = x_high * low + ((x_low * low) >> 16)
    second = x_low * high + (first & 0xFFFF)
    upper = x_high * high + (first >> 16) + (second >> 16)
    return upper, x * np.uint32(factor)
