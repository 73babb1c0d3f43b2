"""Which device holds the arrays of a call, and which can be written."""

from __future__ import annotations

import sys
from typing import Any, Literal

import numpy as np

from cuflash.errors import (
    DTypeError,
    UnsupportedError,
    ValueRangeError,
    in_words,
    type_name,
)
from cuflash.request import hints

# DLPack's device types (DLDeviceType in dlpack.h).
_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def device_of(
    call: str = "forward", /, **arrays: Any
) -> Literal["cpu", "cuda"]:
    """The kind of device that holds the arrays, the same for all of them.

    Parameters
    ----------
    call : str
        Whose arguments they are; see `hints`.
    **arrays
        The arguments by name, as the user passed them.

    Returns
    -------
    str
        ``"cpu"`` if all are NumPy arrays, ``"cuda"`` if all are on a CUDA
        device.

    Raises
    ------
    DTypeError
        If an argument is not an array, or NumPy and CUDA arrays are mixed.
    UnsupportedError
        If an array is on another kind of device, or requires grad, or is a
        view of torch that negates or conjugates.
    """
    cupy = sys.modules.get("cupy")  # imported if the user has CuPy arrays
    kinds = set(map(type, arrays.values()))
    if kinds == {np.ndarray}:
        return "cpu"
    if kinds == {getattr(cupy, "ndarray", None)}:
        return "cuda"
    places = {
        name: _place(call, name, array) for name, array in arrays.items()
    }
    first, expected = next(iter(places.items()))
    for name, place in places.items():
        if place != expected:
            where = {"cpu": "NumPy array", "cuda": "CUDA array"}
            each = ", ".join(
                f"{other} {type_name(array)}"
                for other, array in arrays.items()
            )
            raise DTypeError(
                f"{name} is a {where[place]}, expected a {where[expected]} "
                f"as {first} is: a call runs on one device and moves no "
                f"array ({each})"
            )
    return expected


def writable(name: str, array: Any, receives: str = "the result") -> None:
    """Raise ValueRangeError if an array, as the user passed it, is read-only.

    Parameters
    ----------
    name : str
    array
    receives : str
        What is written to it, for the message.
    """
    if isinstance(array, np.ndarray):
        read_only, shape = not array.flags.writeable, array.shape
    elif type(array) is getattr(sys.modules.get("cupy"), "ndarray", None):
        return  # CuPy has no read-only arrays
    else:
        try:
            interface = array.__cuda_array_interface__
            read_only, shape = interface["data"][1], interface["shape"]
        except Exception:  # no interface, or none for its dtype: assume yes
            return
    if read_only:
        raise ValueRangeError(
            f"{name} is read-only ({type_name(array)} {tuple(shape)}), "
            f"expected a writable array: it receives {receives}"
        )


def _place(call: str, name: str, array: Any) -> Literal["cpu", "cuda"]:
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedError(
                f"{name} is a {type_name(array)}, expected a plain array: "
                f"its mask would be ignored (pass {name}.filled(0), and hide "
                "keys with mask)"
            )
        return "cpu"
    cupy = sys.modules.get("cupy")
    if isinstance(array, getattr(cupy, "ndarray", ())):
        return "cuda"
    if getattr(array, "requires_grad", False):
        raise UnsupportedError(
            f"{name} is a {type_name(array)} that requires grad, expected "
            f"one that does not: {hints.requiring_grad(call, name)}"
        )
    _check_no_lazy_bits(name, array)
    if isinstance(array, _tracers()):
        raise UnsupportedError(
            f"{name} is a JAX tracer ({type_name(array)}), expected an array "
            f"with data: {hints.tracer(call)}"
        )
    # Look on the type first: on an instance the attribute may be computed.
    if hasattr(type(array), "__dlpack_device__"):
        try:
            device_type = int(array.__dlpack_device__()[0])
        except ValueError as error:  # PyTorch's "meta" is none of DLPack's
            raise UnsupportedError(
                f"{name} is a {type_name(array)} on a device that DLPack does"
                " not know, expected a NumPy array or an array on a CUDA"
                f" device ({error})"
            ) from error
        if device_type in _DLPACK_CUDA:
            return "cuda"
        on_cpu = device_type == _DLPACK_CPU
        where = (
            "on the CPU" if on_cpu else f"on DLPack device type {device_type}"
        )
        advice = hints.on_the_cpu(call, name, array) if on_cpu else ""
        raise UnsupportedError(
            f"{name} is a {type_name(array)} {where}, expected a NumPy "
            f"array or an array on a CUDA device{advice}"
        )
    if getattr(array, "__cuda_array_interface__", None) is not None:
        return "cuda"
    if isinstance(array, (list, tuple)):
        raise DTypeError(
            f"{name} is of type {type_name(array)}, expected an array: pass "
            f"np.asarray({name}), or of arrays on a CUDA device "
            f"cupy.asarray({name})"
        )
    if isinstance(array, float):
        raise DTypeError(
            f"{name} is {in_words(array)}, expected an array: pass one of its "
            f"shape, such as np.full(shape, {array})"
        )
    raise DTypeError(
        f"{name} is of type {type_name(array)}, expected an array: NumPy, "
        "CuPy, or any with DLPack or __cuda_array_interface__ on a CUDA "
        "device"
    )


def _check_no_lazy_bits(name: str, array: Any) -> None:
    """Refuse views of torch that negate or conjugate: memory does not."""
    for word, bit in (("negates", "neg"), ("conjugates", "conj")):
        has_bit = getattr(array, f"is_{bit}", None)  # torch's tensors only
        if callable(has_bit) and has_bit():
            raise UnsupportedError(
                f"{name} is a {type_name(array)} view that {word} what is in "
                "memory, expected one of the numbers themselves: DLPack and "
                "__cuda_array_interface__ pass on memory alone (pass "
                f"{name}.resolve_{bit}())"
            )


def _tracers() -> Any:
    """JAX's class of tracers, if the user imported JAX."""
    core = getattr(sys.modules.get("jax"), "core", None)
    return getattr(core, "Tracer", ())


def check_one_device(seen: tuple[tuple, ...]) -> None:
    """Check that the arrays of `describe` are on one device."""
    first, *_, expected = seen[0]
    for name, *_, got in seen:
        if got != expected:
            raise ValueRangeError(
                f"{name} is on CUDA device {got}, expected device "
                f"{expected} as {first} is: a call runs on one device and "
                "moves no array"
            )
