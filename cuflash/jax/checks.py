"""Checks of arguments that the rest of cuflash does not make."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from cuflash import settings
from cuflash.errors import DTypeError, UnsupportedError, type_name


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
