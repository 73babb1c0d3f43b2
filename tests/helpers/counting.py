"""A backend for `cuflash.launch` that runs nothing."""

import contextlib

import numpy as np

from cuflash.plans.plan import device_of_arch

_NOTHING = contextlib.nullcontext()


class Counting:
    """Sums up the bytes that calls allocate, and counts launches.

    Its arrays are zeros that nobody writes to.
    """

    def __init__(self, arch, family=None):
        self.arch, self.family = arch, family
        self.target = self
        self.nbytes = self.launches = 0

    def device(self):
        return device_of_arch(self.arch)

    def load(self, decided):
        return decided.launches

    def empty(self, shape, dtype):
        array = np.zeros(shape, dtype)
        self.nbytes += array.nbytes
        return array

    zeros = empty

    def rows(self, shape, dtype, zero=False):
        return self.empty(shape, dtype)

    def current(self):
        return _NOTHING

    def copy(self, target, source):
        pass

    def stream(self):
        return 0

    def workspace(self, nbytes):
        arrays = [self.empty(size, np.uint8) for size in nbytes]
        return arrays, self.address(arrays)

    def address(self, arrays, written=False):
        return [
            0 if x is None else x.__array_interface__["data"][0]
            for x in arrays
        ]

    @staticmethod
    def tensor_map(address, boxes):
        return bytes(128)

    def launch(self, loaded, arguments, kind):
        self.launches += len(loaded)
