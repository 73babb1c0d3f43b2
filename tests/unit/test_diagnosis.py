"""What messages say of a broken installation, and what to do about it."""

import contextlib
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from cuflash import diagnosis
from cuflash.api import arrays
from cuflash.build import nvrtc, warmup
from cuflash.errors import CompileError, UnsupportedError
from helpers.kernels import small_kernel

OLD = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"


@pytest.fixture
def two_cupys(monkeypatch):
    """Two packages that bring the module cupy, which cannot be imported."""

    def version(name):
        if name in ("cupy-cuda12x", "cupy-cuda13x"):
            return "14.2.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "cupy", None)


def fake_cupy(monkeypatch, *, driver, runtime=13000, error=None, **others):
    """Put a CuPy in place whose runtime knows versions, and has no device."""

    def count():
        raise RuntimeError(error)

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(
        getDeviceCount=count, driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: runtime,
    ))  # fmt: skip
    vars(module).update(others)
    monkeypatch.setitem(sys.modules, "cupy", module)


def test_two_cupys_are_named(two_cupys):
    said = diagnosis.two_cupys()
    assert "pip uninstall cupy-cuda13x cupy-cuda12x, then install" in said


def test_two_cupys_are_why_it_cannot_be_imported(two_cupys):
    with pytest.raises(UnsupportedError, match="pip uninstall cupy-cuda13x"):
        warmup.gpus()
    arrays.on_cuda.cache_clear()
    with pytest.raises(UnsupportedError, match="pip uninstall cupy-cuda13x"):
        arrays.on_cuda()


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (12040, "the NVIDIA driver supports CUDA 12.4, CuPy needs CUDA 13.0:"
                " update the driver, or install cuflash[cuda12]"),
        (11080, "the NVIDIA driver supports CUDA 11.8, CuPy needs CUDA 13.0:"
                " update the driver"),
        (0, "there is no NVIDIA driver, or it is too old: install one for"
            " CUDA 13.0, which CuPy needs"),
    ],
)  # fmt: skip
def test_a_driver_older_than_the_toolkit(monkeypatch, driver, said):
    fake_cupy(monkeypatch, driver=driver, error=OLD)
    with pytest.raises(UnsupportedError) as caught:
        warmup.gpus()
    assert str(caught.value) == f"{said} ({OLD})"


def test_gpus_that_are_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    fake_cupy(monkeypatch, driver=13000, error="cudaErrorNoDevice")
    with pytest.raises(UnsupportedError, match="VISIBLE_DEVICES is '7'"):
        warmup.gpus()


class NotLoaded:
    """A module that the driver does not load."""

    def __init__(self, path):
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")


@pytest.mark.parametrize(("driver", "is_why"), [(12040, True), (13000, False)])
def test_a_kernel_that_an_older_driver_cannot_load(
    monkeypatch, driver, is_why, tmp_path
):
    """The first call says so; of other reasons, the driver's own error."""
    fake_cupy(monkeypatch, driver=driver, RawModule=NotLoaded)
    monkeypatch.setattr(nvrtc, "cubin_file", lambda *of: tmp_path)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5")
    none = contextlib.nullcontext
    monkeypatch.setattr(nvrtc, "_also_while_capturing", none)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID") as caught:
        nvrtc._load(small_kernel(), "sm_80")
    assert isinstance(caught.value, CompileError) == is_why
    if is_why:
        assert "or install cuflash[cuda12] alone" in str(caught.value)


def test_a_kernel_that_two_cupys_cannot_load(two_cupys):
    error = RuntimeError("CUDA_ERROR_INVALID_IMAGE")
    said = diagnosis.not_loaded(error, "13.5", 13000)
    assert said.startswith("a kernel cannot be loaded (CUDA_ERROR_INVALID")
    assert "pip uninstall" in said
