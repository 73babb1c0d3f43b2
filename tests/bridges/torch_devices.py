"""A GPU and an emulated device, for tests that run on either."""

import contextlib
from unittest import mock

import pytest
import torch
from torch_data import on_numpy

from cuflash.backends import emulator
from cuflash.torch import request
from helpers import emulated_torch


class Gpu:
    """This machine's GPU.

    name : of torch.
    sizes : of inputs of several tiles.
    compiler : of torch.compile.
    """

    name = "cuda"
    sizes = {
        "seqlen_q": 200, "seqlen_k": 230, "head_dim": 64, "head_dim_v": 64
    }  # fmt: skip
    compiler = "inductor"

    @classmethod
    @contextlib.contextmanager
    def running(cls):
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        yield cls()

    def put(self, given):
        """Leaves on the device: of a tensor, or of those in a list or dict."""
        if isinstance(given, dict):
            return {name: self.put(x) for name, x in given.items()}
        if isinstance(given, (list, tuple)):
            return type(given)(map(self.put, given))
        if not isinstance(given, torch.Tensor):
            return given
        moved = given.detach().to(self.name, copy=True)
        return moved.requires_grad_(given.requires_grad)

    def expected(self, function, *tensors, **options):
        """What a function of cuflash makes of the same arrays."""
        plain = [x.detach() for x in tensors]
        results = function(*plain, **options)
        if isinstance(results, tuple):
            return tuple(map(torch.from_dlpack, results))
        return torch.from_dlpack(results)

    @contextlib.contextmanager
    def left_out(self):
        """Calls on CPU tensors run on the CPU."""
        yield

    def compile(self, function):
        return torch.compile(function, fullgraph=True, backend=self.compiler)

    def bytes_of_cupy(self):
        """How much memory CuPy's pool took."""
        import cupy

        return cupy.get_default_memory_pool().total_bytes()


class Emulated(Gpu):
    """CPU tensors, as an A100's memory."""

    name = "cpu"
    sizes = {"seqlen_q": 20, "seqlen_k": 70, "head_dim": 16, "head_dim_v": 16}
    compiler = "aot_eager"

    def __init__(self, device):
        self._device = device

    @classmethod
    @contextlib.contextmanager
    def running(cls):
        with emulated_torch.active("sm_80") as device:
            yield cls(device)
            assert device.launches, "no kernel ran"

    def expected(self, function, *tensors, **options):
        return on_numpy(function, *tensors, **options)

    @contextlib.contextmanager
    def left_out(self):
        with (
            mock.patch.object(request, "backend_of", lambda x: None),
            mock.patch.object(emulator, "current", lambda: None),
        ):
            yield

    def bytes_of_cupy(self):
        return sum(x[2] for x in self._device.fake.logged("alloc"))
