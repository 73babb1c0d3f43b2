"""From a planned kernel to a function on the GPU."""

import pytest

from cuflash.build import nvrtc
from helpers.kernels import small_kernel

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(cp, tmp_path, monkeypatch):

    from cuflash.backends import cupy as gpu

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_functions", {})
    return gpu.device(cp.cuda.runtime.getDevice())


def test_a_function_is_loaded_once(device):
    kernel = small_kernel(device.arch)
    first = nvrtc.function(kernel, device)
    assert nvrtc.function(kernel, device) is first
    assert first.name == kernel.entry
    assert first.max_dynamic_shared_size_bytes == kernel.shared_bytes


def test_the_device_runs_what_nvrtc_reported(device):
    kernel = small_kernel(device.arch)
    report = nvrtc.report(kernel, device.arch)
    loaded = nvrtc.function(kernel, device)
    assert loaded.num_regs == report.registers
    assert loaded.local_size_bytes >= report.spill_bytes


def test_the_driver_tells_name_and_bandwidth(cp, device):
    """No GPU from sm_75 on has a memory slower than 50 GB/s."""
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    assert device.name == properties["name"].decode()
    assert device.bandwidth is None or device.bandwidth > 50


def test_a_damaged_file_is_compiled_again(device):
    kernel = small_kernel(device.arch)
    path = nvrtc.cubin_file(kernel, device.arch)
    path.write_bytes(path.read_bytes()[:100])
    assert nvrtc.function(kernel, device).num_regs > 0


def test_a_function_can_be_loaded_while_a_stream_records(cp, device):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        loaded = nvrtc.function(small_kernel(device.arch, 32), device)
        stream.end_capture()
    assert loaded.num_regs > 0
