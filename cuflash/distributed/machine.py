"""Where a rank computes: NumPy, or kernels on a GPU or on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash.api import arrays as api_arrays
from cuflash.backends import emulator


class Host:
    """NumPy arrays, combined by NumPy."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array."""
        return np.empty(shape, dtype)

    def copy(self, target: Any, source: Any) -> None:
        """Copy `source` to `target`, converting dtypes."""
        target[...] = source

    def offsets(self, values: tuple[int, ...]) -> Any:
        """Offsets as an array."""
        return np.asarray(values, np.int32)

    @np.errstate(all="ignore")
    def merge(
        self, a: Any, lse_a: Any, others: Sequence[tuple[Any, Any]], to: Any
    ) -> None:
        """Merge others into a, as `launch.partial.merge_rows` does."""
        given = [(a, lse_a), *others]
        m = functools.reduce(np.maximum, (lse for _, lse in given))
        finite = np.where(m == -np.inf, 0, m).astype(m.dtype)
        weights = [np.exp(lse - finite) for _, lse in given]
        total = functools.reduce(np.add, weights)
        merged = np.zeros(a.shape, m.dtype)
        for weight, (x, lse) in zip(weights, given, strict=True):
            share = (weight / total).swapaxes(1, 2)[..., None]
            # A side without keys takes no part, whatever it holds.
            used = (lse != -np.inf).swapaxes(1, 2)[..., None]
            merged += np.where(used, share * x.astype(m.dtype), 0)
        to[...] = merged
        lse = np.where(m == np.inf, m, finite + np.log(total))
        lse_a[...] = np.where(m == -np.inf, m, lse)

    @np.errstate(all="ignore")
    def add(self, a: Any, others: Sequence[Any], to: Any) -> None:
        """Store the sum of a and others in `to`, summed in the wider dtype."""
        wide = np.float64 if a.dtype == np.float64 else np.float32
        to[...] = functools.reduce(
            np.add, (x.astype(wide) for x in (a, *others))
        )


class Device(Host):
    """Arrays that kernels combine."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def backend(self) -> Any:
        """The backend of one call: the emulator has one for each."""
        emulated = emulator.current()
        if emulated and isinstance(self._array, np.ndarray):
            return emulated.backend()
        return api_arrays.on_cuda().backend_of(self._array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.backend.empty(shape, dtype)

    def copy(self, target: Any, source: Any) -> None:
        self.backend.copy(target, source)

    def offsets(self, values: tuple[int, ...]) -> Any:
        if isinstance(self._array, np.ndarray):
            return super().offsets(values)
        return _offsets_on(self._array.device.id, values)

    def merge(
        self, a: Any, lse_a: Any, others: Sequence[tuple[Any, Any]], to: Any
    ) -> None:
        _kernels().merge_rows(self.backend, a, lse_a, others, to)

    def add(self, a: Any, others: Sequence[Any], to: Any) -> None:
        _kernels().add_rows(self.backend, a, others, to)


def machine_of(array: Any) -> Host:
    """The machine that computes with an array of NumPy or CuPy."""
    if isinstance(array, np.ndarray) and not emulator.current():
        return Host()
    return Device(array)


@functools.cache
def _kernels() -> Any:
    from cuflash.launch import partial as execute_partial

    return execute_partial


@functools.lru_cache(maxsize=1024)
def _offsets_on(device: int, values: tuple[int, ...]) -> Any:
    cupy = api_arrays.on_cuda().cupy
    with cupy.cuda.Device(device):
        array = cupy.asarray(np.asarray(values, np.int32))
        # Other streams read it: it must be there before they do.
        cupy.cuda.get_current_stream().synchronize()
    return array
