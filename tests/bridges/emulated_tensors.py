"""A backend of CPU tensors that runs the kernels on the emulator."""

import contextlib

import torch

from cuflash import emulator
from cuflash.torch.arrays import TorchArrays
from cuflash.torch.dtypes import to_numpy


class EmulatedTensors(TorchArrays):
    """`backends.base.Backend`, by the emulator's, of the same memory."""

    tensor_device = torch.device("cpu")

    def __init__(self, emulated):
        self.target = emulated
        self.machine = emulated.backend()
        self.arrays = {}

    def current(self):
        return contextlib.nullcontext()

    def address(self, arrays, written=False):
        return self.machine.address(map(self._array, arrays), written)

    def _array(self, tensor):
        """One array for all tensors at an address: the emulator's way."""
        if tensor is None:
            return None
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        return self.arrays.setdefault(place, to_numpy(tensor))

    def launch(self, loaded, arguments, kind):
        self.machine.launch(loaded, arguments, kind)

    @staticmethod
    def tensor_map(address, boxes):
        raise AssertionError("kernels without TensorMaps only")


@contextlib.contextmanager
def backends(**options):
    """A function that gives each call a backend of its own."""
    with emulator.active(**options) as emulated:
        yield lambda _: EmulatedTensors(emulated)
