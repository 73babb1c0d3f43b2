"""The CUDA lowering without a GPU: its kernels run on the emulator."""

import contextlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cuflash import emulator
from cuflash.backends.emulator.machine import Machine as EmulatedMemory
from cuflash.jax import cpu, cuda
from cuflash.jax.machine import Cuda
from helpers.emulated_cuda import OF_JAX, EmulatedCuda, replace

STREAM = 42


class Memory(EmulatedMemory):
    """The emulator's memory of one callback, as `jax.machine.Queue`."""

    def __init__(self, target, buffers):
        super().__init__(target)
        self.arrays = [np.asarray(x) for x in buffers]
        addresses = [
            self.address_of(x, written=x.flags.writeable) for x in self.arrays
        ]
        self.addresses = addresses
        self.at = dict(zip(addresses, self.arrays, strict=True))

    def clear(self, address, nbytes):
        assert self.at[address].nbytes == nbytes
        self.at[address].fill(0)

    def read(self, address, nbytes):
        return self.at[address].tobytes()


class EmulatedMachine:
    """Emulated GPUs, as `jax.machine.Machine`.

    archs : the architecture of each, the first of which lowers.
    index : of the one that holds all buffers.
    """

    def __init__(self, *archs):
        self.targets = []
        for arch in archs:
            with emulator.active(arch) as target:
                self.targets.append(target)
        self.planned = self.runs = self.index = 0

    def first_device(self):
        return 0

    def backend(self, index):
        self.planned += 1
        return self.targets[index].backend()

    def open(self, context, buffers):
        self.runs += 1
        memory = Memory(self.targets[self.index], buffers)
        return self.index, memory.addresses, memory


class EmulatedJax(EmulatedCuda):
    """An emulated device, and what JAX knows of it."""

    def install(self, monkeypatch):
        super().install(monkeypatch)
        self._open = Cuda.open
        replace(monkeypatch, OF_JAX, self)

    def first_device(self, machine):
        return 0

    def noting_memory(self, machine, context, buffers):
        for array in map(np.asarray, buffers):
            if array.size:
                self.hold(
                    array.ctypes.data, array.reshape(-1).view(np.uint8),
                    array.flags.writeable,
                )  # fmt: skip
        return self._open(machine, SimpleNamespace(stream=STREAM), buffers)


@contextlib.contextmanager
def by_the_driver(arch):
    """Calls run by CuPy's backend on an emulated device; NumPy's on it too."""
    device = EmulatedJax(arch)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        emulator.active(arch),
        lowered_for(Cuda(), "cpu"),
    ):
        device.install(monkeypatch)
        yield device


@contextlib.contextmanager
def lowered_for(machine, platform):
    """Calls on a platform take the CUDA lowering, onto a machine."""
    jax.clear_caches()
    cuda.register(machine, platform)
    try:
        yield machine
    finally:
        cpu.register()
        cuda.register(Cuda(), "cuda")
        jax.clear_caches()


def emulated(*archs, platform="cpu"):
    """Calls on a platform take the CUDA lowering, onto the emulator."""
    return lowered_for(EmulatedMachine(*archs), platform)
