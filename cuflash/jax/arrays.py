"""Arrays of a traced call: only shapes and dtypes are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuflash import settings
from cuflash.errors import DTypeError, UnsupportedError, type_name


@dataclass(frozen=True, eq=False)
class Abstract:
    """A C-contiguous array without data, as `validate` reads arrays.

    XLA's buffers are aligned, so the address counts as 0.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    slot : int
        Which of a callback's buffers holds the data.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    slot: int = -1
    ptr: int = 0
    device_id: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(
            self.dtype.itemsize * math.prod(self.shape[axis + 1 :])
            for axis in range(len(self.shape))
        )

    def __getitem__(self, index: int) -> Abstract:
        """The only element along the first axis, in the same memory."""
        assert index == 0 and self.shape[0] == 1
        return replace(self, shape=self.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def data(self) -> Abstract:
        """The memory, which has the address and the device."""
        return self


def abstract(array: Any, slot: int = -1) -> Abstract:
    """An array, a tracer or an abstract value, without data."""
    return Abstract(tuple(array.shape), np.dtype(array.dtype), slot)


def check_array(name: str, array: Any) -> None:
    """Raise unless an argument is a JAX or a NumPy array."""
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedError(
            f"{name} is a {type_name(array)}, expected a plain array: its "
            "mask would be ignored"
        )
    if not isinstance(array, jax.Array | np.ndarray):
        known = hasattr(type(array), "__dlpack__")
        make = "from_dlpack" if known else "asarray"
        advice = "" if array is None else f" (pass jax.numpy.{make}({name}))"
        raise DTypeError(
            f"{name} is of type {type_name(array)}, expected a JAX array"
            f"{advice}"
        )
    if not isinstance(array.dtype, np.dtype):
        advice = f" (pass jax.random.bits({name}))" if name == "seed" else ""
        raise DTypeError(
            f"{name} is a JAX array of {array.dtype}, expected an array of "
            f"numbers{advice}"
        )
    wide = array.dtype == np.float64
    if wide and not jax.config.jax_enable_x64:
        raise DTypeError(
            f"{name} has dtype float64, which JAX would round to float32: "
            'call jax.config.update("jax_enable_x64", True) first, or pass '
            "float32"
        )


def on_host(array: Any) -> np.ndarray | None:
    """An array's values, if the host may read them.

    None for a tracer, and for an array on a device other than the CPU unless
    CUFLASH_CHECK is 1: reading it waits for the device.
    """
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    if on_cpu or settings.read("CUFLASH_CHECK") == "1":
        return np.asarray(array)
    return None


_OR = {"scale": ", or pass scale=1 and q * scale"}


def check_static(name: str, value: Any) -> None:
    """Raise if a number that is compiled into a call is a JAX array."""
    values = value if isinstance(value, tuple) else (value,)
    for each in values:
        if isinstance(each, jax.core.Tracer):
            raise UnsupportedError(
                f"{name} is a JAX tracer, expected a Python value: it is "
                "compiled into the call (name it in jax.jit's "
                f"static_argnames{_OR.get(name, '')})"
            )
        if isinstance(each, jax.Array):
            value = f"{name}.item()"
            if each.ndim:
                value = f"tuple({name}.tolist())"
            raise DTypeError(
                f"{name} is a JAX array, expected a Python value: it is "
                f"compiled into the call (pass {value})"
            )


def equally_varying(arrays: list[Any]) -> list[Any]:
    """The arrays, marked as varying over the same axes of shard_map.

    The transpose sums gradients over the axes along which an array was
    replicated.
    """
    arrays = [jnp.asarray(x, dtype=x.dtype) for x in arrays]
    types = [jax.typeof(x) for x in arrays]
    axes = frozenset().union(*(x.mat.varying for x in types))
    return [
        jax.lax.pcast(x, tuple(axes - own), to="varying")
        if (own := kind.mat.varying) != axes
        else x
        for x, kind in zip(arrays, types, strict=True)
    ]
