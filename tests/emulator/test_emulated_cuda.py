"""The device that stands for a GPU below the backend for CUDA."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.compare import assert_all
from helpers.emulated_cuda import EmulatedCuda


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_plans_are_those_of_its_architecture(monkeypatch, arch):
    device = EmulatedCuda(arch)
    backend = device.install(monkeypatch).backend(0)
    known = device.machine.device()
    assert replace(backend.device(), name=known.name) == known


def test_new_memory_is_nan():
    memory = EmulatedCuda("sm_80").new(64)
    assert memory.ctypes.data % 256 == 0
    for dtype in (np.float16, np.float32, np.float64):
        assert_all(memory.view(dtype), np.nan, np.dtype(dtype).name)


def test_kernels_access_the_memory_of_their_call_alone():
    device, memory = EmulatedCuda("sm_80"), np.zeros(8, np.uint8)
    address = memory.ctypes.data
    device.hold(address, memory)
    assert device._region(address + 7).memory is memory
    for outside in (address - 1, address + 8):
        with pytest.raises(AssertionError, match="in no allocation"):
            device._region(outside)


def test_memory_stays_read_only_unless_it_is_written():
    device, memory = EmulatedCuda("sm_80"), np.zeros(8, np.uint8)
    for written, expected in ((False, False), (True, True), (False, True)):
        device.hold(memory.ctypes.data, memory, written)
        assert device._region(memory.ctypes.data).written is expected
