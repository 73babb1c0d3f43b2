"""Runs calls on CPU tensors by kernels, which the emulator runs."""

import contextlib

from cuflash.torch import request
from cuflash.torch.arrays import TorchArrays
from cuflash.torch.dtypes import from_numpy, to_numpy


class EmulatedTensors(TorchArrays):
    """A `Backend` of CPU tensors: torch's side is that of CUDA tensors."""

    def __init__(self, emulator):
        self.target = emulator
        self.machine = emulator.backend()
        self.tensor_map = self.machine.tensor_map
        self.launch = self.machine.launch
        self.stream = self.machine.stream
        self.views = {}

    def current(self):
        return contextlib.nullcontext()

    def empty(self, shape, dtype):
        """NaN, aligned as on a GPU."""
        return from_numpy(self.machine.empty(shape, dtype))

    def zeros(self, shape, dtype):
        return self.empty(shape, dtype).zero_()

    def workspace(self, nbytes):
        return self.machine.workspace(nbytes)

    def address(self, arrays, written=False):
        return [
            0 if x is None else self.machine.address_of(self.view(x), written)
            for x in arrays
        ]

    def view(self, tensor):
        """The same array for a tensor: the emulator tells them by identity."""
        _, view = self.views.setdefault(id(tensor), (tensor, to_numpy(tensor)))
        return view


def use(monkeypatch, emulator):
    """Let calls on CPU tensors run by an emulator."""
    monkeypatch.setattr(
        request, "backend_of", lambda x: EmulatedTensors(emulator)
    )
