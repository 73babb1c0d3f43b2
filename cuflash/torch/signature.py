"""From tensors to a checked call: validated once, then looked up.

The key of the look-up holds shapes, strides, dtypes, alignments and devices
of the tensors and the values of the other arguments, never the data.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from cuflash import settings
from cuflash.errors import DTypeError, UnsupportedError, ValueRangeError
from cuflash.request.problem import ALIGNMENT, Call

from .dtypes import NUMPY

# (name, shape, strides, dtype, address modulo ALIGNMENT, device)
Described = tuple[
    str, tuple[int, ...], tuple[int, ...], torch.dtype, int, torch.device
]


def describe(name: str, x: torch.Tensor) -> Described:
    """A tensor without its data; part of a key."""
    return (
        name, x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT, x.device
    )  # fmt: skip


class Shown:
    """A tensor as `validate` looks at arrays on a CUDA device."""

    def __init__(self, described: Described) -> None:
        name, shape, strides, dtype, offset, device = described
        if dtype not in NUMPY:
            raise DTypeError(
                f"{name} has dtype {dtype}, which NumPy does not support"
            )
        self.shape, self.ndim = tuple(shape), len(shape)
        self.dtype = NUMPY[dtype]
        itemsize = self.dtype.itemsize
        self.strides = tuple(stride * itemsize for stride in strides)
        self.data = self  # as of a CuPy array
        self.ptr = offset
        self.device_id = device.index

    def exchanged(self) -> Shown:
        """The same, by tokens, of an array whose heads stand before these."""
        found = copy.copy(self)
        found.data = found
        for name in ("shape", "strides"):
            a, b, c, d = getattr(self, name)
            setattr(found, name, (a, c, b, d))
        return found


# The arrays of a call that have an axis of heads and one of tokens.
ROWS = frozenset(("q", "k", "v", "out", "dout"))


@functools.cache
def by_heads(check: Callable[..., Any]) -> Callable[..., Any]:
    """A check of calls on (batch, heads, seqlen, head_dim) tensors."""

    def exchanged(**given: Any) -> Any:
        for name in ROWS & given.keys():
            given[name] = given[name].exchanged()
        return check(**given)

    return exchanged


def check_devices(devices: dict[str, torch.device]) -> None:
    """Check that tensors are on one device, a CUDA device or the CPU."""
    first, expected = next(iter(devices.items()))
    if expected.type not in ("cuda", "cpu"):
        raise UnsupportedError(
            f"{first} is on {expected}, expected a CUDA device or the CPU"
        )
    for name, got in devices.items():
        if got != expected:
            raise ValueRangeError(
                f"{name} is on {got}, expected {expected} as {first} is: a "
                "call runs on one device and moves no tensor"
            )


def checked(
    check: Callable[..., Any], described: tuple[Described, ...], *values: Any
) -> Any:
    """The signature of what `check` returns, looked up if it is known.

    Parameters
    ----------
    check : callable
        Takes tensors (as `Shown`) and other arguments by name. Of a Call
        that it returns the signature is kept, anything else as it is.
    described : tuple
        The tensors.
    *values
        Names and values of the other arguments, alternating: flat, because
        the look-up tells 1 from 1.0 and True at this level only.
    """
    try:
        return _remembered(check, described, *values)
    except TypeError as error:
        if isinstance(error, DTypeError):
            raise
        return _check(check, described, *values)  # unhashable: says what


def checked_shapes(
    check: Callable[..., Any], tensors: dict[str, torch.Tensor], *values: Any
) -> Any:
    """As `checked`, for torch's own operations: they take any strides.

    None if a shape has symbols, or tensors as in torch.jit.trace.
    """
    if any(type(n) is not int for x in tensors.values() for n in x.shape):
        return None
    described = [
        (name, x.shape, (1,) * x.ndim, x.dtype, 0, x.device)
        for name, x in tensors.items()
    ]
    if all(x.is_meta for x in tensors.values()):
        cpu = torch.device("cpu")
        described = [(*x[:-1], cpu) for x in described]
    return checked(check, tuple(described), *values)


def _check(
    check: Callable[..., Any], described: tuple[Described, ...], *values: Any
) -> Any:
    settings.check()
    check_devices({name: device for name, *_, device in described})
    shown = {x[0]: Shown(x) for x in described}
    others = dict(zip(values[::2], values[1::2], strict=True))
    found = check(**shown, **others)
    return found.signature if isinstance(found, Call) else found


_remembered = functools.lru_cache(maxsize=4096, typed=True)(_check)
