"""Fills an argument struct: constants once, then addresses at each call."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cuflash.launch.structs import TensorMap


class Template:
    """An argument struct that lacks only its TensorMaps and pointers.

    These come first; the struct's last fields may be pointers too.

    Parameters
    ----------
    kind : dtype
        One of the structs above.
    **constants
        The other fields, and those of the field ``arrays``. A nested struct
        is given as a dict of its fields; fields left out are 0.
    """

    def __init__(self, kind: np.dtype, **constants: Any) -> None:
        filled = np.zeros((), kind)
        for name, value in constants.items():
            fields = filled if name in (kind.names or ()) else filled["arrays"]
            if isinstance(value, dict):
                for inner, number in value.items():
                    fields[name][inner] = number
            else:
                fields[name] = value
        leaves = [*_leaves(kind)]
        maps = leaves.count(TensorMap)
        last, end = _last_pointers(kind)
        self._count = leaves.count(np.dtype(np.uint64)) - last
        self.kind = kind
        self._first = struct.Struct(
            "=" + f"{TensorMap.itemsize}s" * maps + f"{self._count}Q"
        )
        self._rest = filled.tobytes()[self._first.size : end]
        padding = kind.itemsize - end - 8 * last
        self._last = struct.Struct(f"={last}Q{padding}x")

    def fill(self, maps: Iterable[bytes], pointers: Sequence[int]) -> bytes:
        """The struct's bytes."""
        first, last = pointers[: self._count], pointers[self._count :]
        return (
            self._first.pack(*maps, *first)
            + self._rest
            + self._last.pack(*last)
        )


def _last_pointers(kind: np.dtype) -> tuple[int, int]:
    """How many of a struct's last fields are pointers, and their offset."""
    count, offset = 0, kind.itemsize
    for field, start, *_ in reversed(list(dict(kind.fields or {}).values())):
        if field != np.uint64:
            break
        count, offset = count + 1, start
    return count, offset


def _leaves(kind: np.dtype) -> Iterator[np.dtype]:
    """The dtypes of a struct's fields and nested fields, in order."""
    if kind.subdtype and kind.base == np.uint64:  # an array of pointers
        yield from [kind.base] * kind.shape[0]
        return
    if kind.names is None or kind == TensorMap:
        yield kind
        return
    for name in kind.names:
        yield from _leaves(kind[name])
