"""Backends of the tests: the NumPy reference, emulated kernels, a GPU.

Tests use NumPy arrays. `place` copies one to the device with the same strides
and alignment, `fetch` copies a result back. Calls are made within `running`.
"""

import contextlib
from dataclasses import replace
from itertools import cycle, islice, product
from unittest import mock

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from cuflash import emulator
from cuflash.launch import recipe
from cuflash.plans import nearest_tiles, plan, tiles

from . import tried
from .data import SIMT, Emulation
from .dtypes import DTYPES
from .host_compiler import needs_compiler


class NumpyBackend:
    """The CPU path: arrays stay where they are."""

    name = "numpy"
    array_type = np.ndarray

    def place(self, array):
        return array

    def fetch(self, array):
        return array

    def running(self, case):
        """Run calls as the case says; here there is nothing to choose."""
        return contextlib.nullcontext()

    def poison(self):
        """Nothing to do: NumPy memory is not pooled."""


class EmulatedBackend(NumpyBackend):
    """The kernels, run on NumPy arrays by the emulator."""

    name = "emulated"

    @contextlib.contextmanager
    def running(self, case):
        """Emulate the case's machine, on which its tiles are the tuned ones.

        No argument of a call selects a tile: many tiles have the same block
        sizes.
        """
        on = case.on
        chosen = {"forward": on.forward_tile, "backward": on.backward_tile}
        device = plan.device_of_arch(on.arch)
        device = replace(
            device,
            num_sms=on.num_sms or device.num_sms,
            l2_bytes=on.l2_bytes or device.l2_bytes,
        )

        def tuned(capability, family, direction, *rest):
            if chosen.get(direction) in tiles.candidates(family, direction):
                return (chosen[direction],)
            return known(capability, family, direction, *rest)

        known = nearest_tiles.tuned
        with (
            mock.patch.object(nearest_tiles, "tuned", tuned),
            mock.patch.object(plan, "device_of_arch", lambda arch: device),
            # Plans are cached by problem, and these must not stay.
            mock.patch.object(
                recipe, "plan", tried.noting(plan.plan.__wrapped__)
            ),
            emulator.active(
                on.arch,
                on.seed,
                on.resident,
                family=on.family,
                truncates=on.truncates,
            ),
        ):
            yield


class CupyBackend:
    """The GPU path."""

    name = "cupy"

    def running(self, case):
        """Run calls on the current device."""
        return contextlib.nullcontext()

    @property
    def array_type(self):
        import cupy

        return cupy.ndarray

    def place(self, array):
        """Copy a NumPy view's memory to the device and view it alike."""
        import cupy

        if array.size == 0:
            return cupy.empty(array.shape, array.dtype)
        first, end = byte_bounds(array)
        start = array.__array_interface__["data"][0]
        # Device memory is 256-byte aligned; keep the host's alignment, so
        # that a misaligned view is misaligned there too.
        lead = first % 256
        host = np.full(lead + end - first, 0xFF, np.uint8)
        host[lead:] = _bytes_at(first, end, array)
        memory = cupy.asarray(host)
        return cupy.ndarray(
            array.shape,
            array.dtype,
            memptr=memory.data + (lead + start - first),
            strides=array.strides,
        )

    def fetch(self, array):
        import cupy

        return cupy.asnumpy(array)

    def poison(self, nbytes=1 << 22):
        """Fill the free block of CuPy's pool that the next calls get.

        All bits 1 are NaN in every dtype, which reveals elements that no
        kernel writes.
        """
        import cupy

        blocks = [
            cupy.full(size, 0xFF, np.uint8)
            for size in (1 << 10, 1 << 14, 1 << 18, nbytes)
        ]
        del blocks


def _bytes_at(first, end, owner):
    """View host memory [first, end), which `owner` keeps alive."""
    holder = _Memory(first, end - first, owner)
    return np.asarray(holder)


class _Memory:
    def __init__(self, address, nbytes, owner):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, True),
        }


NUMPY = pytest.param(NumpyBackend(), id="numpy")
EMULATED = pytest.param(EmulatedBackend(), id="emulated", marks=needs_compiler)
CUPY = pytest.param(CupyBackend(), id="cupy", marks=pytest.mark.gpu)

BACKENDS = [NUMPY, EMULATED, CUPY]

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", [EMULATED, CUPY])


def _machine(dtype, arch):
    """A second kind of float32 kernels is that of simt."""
    return SIMT if (dtype, arch) == ("float32", "sm_75") else Emulation(arch)


def _each_kind(backends):
    """Choices of a backend, a dtype and what to emulate."""
    others = {"float16": "sm_90a", "bfloat16": "sm_90a", "float32": "sm_75"}
    for backend, name in product(backends, DTYPES):
        other = others.get(name) if backend is EMULATED else None
        for arch in filter(None, ["sm_80", other]):
            yield pytest.param(
                *backend.values,
                name,
                _machine(name, arch),
                marks=backend.marks,
                id="-".join([backend.id, name, *([arch] if other else [])]),
            )


# With every kind of forward kernel.
_NAMES = ("backend", "dtype", "on")
on_each_kind = pytest.mark.parametrize(_NAMES, [*_each_kind(BACKENDS)])
on_each_emulated_kind = pytest.mark.parametrize(
    _NAMES, [*_each_kind([EMULATED])]
)


def _kinds_with_options():
    """Kernels that support all options; on a GPU the first of a dtype."""
    kinds = [("bfloat16", "sm_80"), ("float32", "sm_80"), ("float32", "sm_75")]
    for dtype, arch in kinds:
        emulated = [*EMULATED.values, dtype, _machine(dtype, arch)]
        yield pytest.param(
            *emulated, marks=EMULATED.marks, id=f"emulated-{dtype}-{arch}"
        )
    for dtype, arch in dict(kinds[::-1]).items():
        gpu = [*CUPY.values, dtype, Emulation(arch)]
        yield pytest.param(*gpu, marks=CUPY.marks, id=f"cupy-{dtype}")


on_each_kind_with_options = pytest.mark.parametrize(
    _NAMES, [*_kinds_with_options()]
)


def on_kernels_of(**values):
    """Run a test on kernels, with values of several arguments.

    On a GPU, with all combinations. Emulated, where compiling takes longest,
    with as many combinations as the longest list has values, which cover all
    values.
    """
    longest = max(len(x) for x in values.values())
    beside = zip(
        *(islice(cycle(x), longest) for x in values.values()), strict=True
    )
    choices = [(EMULATED, beside), (CUPY, product(*values.values()))]
    return pytest.mark.parametrize(
        ("backend", *values),
        [
            pytest.param(
                *backend.values,
                *chosen,
                marks=backend.marks,
                id="-".join(map(_id_of, (backend.id, *chosen))),
            )
            for backend, all_chosen in choices
            for chosen in all_chosen
        ],
    )


def _id_of(value):
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)
