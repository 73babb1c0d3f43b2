"""CPU tensors as the memory of an emulated CUDA device.

Calls of `cuflash.torch` on them take the path of CUDA tensors, down to the
launch by the driver (`emulated_cuda.py`; its `OF_TORCH` names what they would
ask torch about a CUDA device).
"""

import contextlib
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import cuflash
import cuflash.torch
from cuflash import emulator
from cuflash.torch import request
from cuflash.torch.dtypes import to_numpy

from .emulated_cuda import OF_TORCH, EmulatedCuda, replace

STREAM = 99


class EmulatedTorch(EmulatedCuda):
    """An emulated device, and what torch knows of it."""

    def install(self, monkeypatch):
        by_cupy = super().install(monkeypatch)
        # Imports it again, on the emulated CuPy, at the first call.
        name = "cuflash.torch.backend"
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
        monkeypatch.setattr(cuflash.torch, "backend", None, raising=False)
        monkeypatch.setattr(request, "_cuda", request._cuda.__wrapped__)
        self.module = importlib.import_module(name)
        self._addresses_of_backend = self.module.TorchBackend.address
        replace(monkeypatch, OF_TORCH, self)
        self.backend = self.module.backend(0)
        self.backend.tensor_device = torch.device("cpu")
        return by_cupy

    def backend_of(self, x):
        backend = request._cuda()(0)
        assert backend is self.backend
        return None if x.is_meta else backend

    def stream(self, index):
        assert index == 0
        return STREAM

    def current_stream(self, device):
        return SimpleNamespace(__cuda_stream__=lambda: (0, STREAM))

    def to_array(self, x):
        return to_numpy(x)

    def new_tensor(self, shape, strides, dtype):
        # It refuses what torch's own refuses, such as a torch.Size.
        like = torch._C._dynamo.guards._empty_strided_cpu(
            shape, strides, dtype
        )
        if not like.numel():
            return like
        new = torch.from_numpy(self.new(like.nbytes)).view(dtype)
        new = new.as_strided(shape, strides)
        self.hold_tensor(new, written=True)
        return new

    def noting_memory(self, backend, arrays, written=False):
        arrays = [*arrays]
        for x in arrays:
            if x is not None and x.numel():
                self.hold_tensor(x, written)
        return self._addresses_of_backend(backend, arrays, written)

    def hold_tensor(self, x, written):
        """Let kernels access the storage of a tensor, as on a GPU."""
        storage = x.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.hold(storage.data_ptr(), memory, written)


@contextlib.contextmanager
def active(arch, seed=0):
    """Calls on CPU tensors run on this device; those on NumPy arrays too.

    In the same order of warps, so that both give the same bits.
    """
    device = EmulatedTorch(arch, seed)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        emulator.active(arch, seed),
    ):
        device.install(monkeypatch)
        yield device
