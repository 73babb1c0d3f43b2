"""Where a call runs: the arrays in their own library, and its runner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash import diagnosis, folders, settings
from cuflash.backends import emulator
from cuflash.errors import CuflashError, DTypeError, UnsupportedError
from cuflash.request import options
from cuflash.request.validate import devices, host_values

if TYPE_CHECKING:
    from cuflash.backends.base import Runner


def check_offsets(call: Any) -> None:
    """Check offsets on the host; on a device only if CUFLASH_CHECK is 1."""
    if reads_values(call.options.get("cu_seqlens_q")):
        host_values.offsets(call)


def reads_values(array: Any) -> bool:
    """Whether the host checks the values of an array, which may be None."""
    if array is None:
        return False
    on_host = isinstance(array, np.ndarray)
    return on_host or settings.read("CUFLASH_CHECK") == "1"


# What a call writes to arrays of the user.
OUT = {"out": "the result"}


GRADIENTS = {x: f"the gradient of {x[1:]}" for x in ("dq", "dk", "dv")}


CACHES = {**OUT, "k_cache": "k_new", "v_cache": "v_new"}


def open_arrays(
    call: str,
    given: dict[str, Any],
    written: Mapping[str, str] | None = None,
) -> tuple[Runner, dict[str, Any]]:
    """The runner for the arrays' device, and the arrays in its library.

    `call` names the call, for messages (`hints`). `written` tells which
    arrays, if given, must be writable, and for what. Call the runner's
    `finish` when all of a call is queued.
    """
    settings.check()
    device = devices.device_of(call, **given)
    for name, receives in (written or {}).items():
        if name in given:
            devices.writable(name, given[name], receives)
    if device == "cpu":
        arrays = {name: np.asarray(x) for name, x in given.items()}
        for name in options.INDICES.intersection(arrays):
            arrays[name] = host_values.integers_on_host(name, arrays[name])
        emulated = emulator.current()
        if emulated:
            return _kernels()(emulated.backend()), arrays
        return _host(), arrays
    cupy = on_cuda()
    arrays, finish = given, None
    if {*map(type, given.values())} != {cupy.Array}:
        arrays = {name: _to_cupy(cupy, name, x) for name, x in given.items()}
        lent = [(x, arrays[n]) for n, x in given.items() if x is not arrays[n]]
        finish = functools.partial(cupy.give_back, lent) if lent else None
    first = next(iter(arrays.values()))
    return _kernels()(cupy.backend_of(first), finish), arrays


@functools.cache
def _kernels() -> Callable[..., Runner]:
    """The class that runs calls on a backend."""
    from cuflash.launch.runner import Kernels

    return Kernels


@functools.cache
def _host() -> Runner:
    """The runner of calls on NumPy arrays."""
    from cuflash.backends.numpy import attention as numpy
    from cuflash.launch.host import Host

    return Host(numpy)


@functools.cache
def on_cuda() -> ModuleType:
    """The backend for CUDA arrays; UnsupportedError if CuPy is missing."""
    try:
        from cuflash.backends import cupy
    except ImportError as error:
        if (error.name or "").startswith("cuflash"):
            raise
        raise UnsupportedError(
            "arrays on a CUDA device need CuPy, which could not be "
            'imported: pip install "cuflash[cuda13]", or "cuflash[cuda12]" '
            "for a CUDA 12 driver" + _and(diagnosis.two_cupys())
        ) from error
    except OSError as error:
        raise UnsupportedError(folders.why_no_cupy(error)) from error
    return cupy


def _and(advice: str) -> str:
    return f"; {advice}" if advice else ""


def _to_cupy(cupy: ModuleType, name: str, array: Any) -> Any:
    try:
        return cupy.to_cupy(array)
    except CuflashError:
        raise
    except (BufferError, TypeError, ValueError) as error:
        kind = type(array)
        raise DTypeError(
            f"{name} is of type {kind.__module__}.{kind.__qualname__}, "
            f"which CuPy cannot read: {error}"
        ) from error
