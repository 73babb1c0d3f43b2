"""The versions of what runs, and the GPUs: the head of a bug report."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from cuflash import diagnosis
from cuflash._version import __version__
from cuflash.build import nvrtc
from cuflash.errors import CuflashError

_CHECKOUT = Path(__file__).parents[2]
_PACKAGES = "numpy", "ml_dtypes"


def versions() -> Iterator[tuple[str, str]]:
    """Name and version of all that takes part, one line each."""
    yield "cuflash", " ".join(filter(None, (__version__, _revision())))
    system = platform.platform(terse=True)
    yield "Python", f"{platform.python_version()} on {system}"
    for package in _PACKAGES:
        yield package, version(package)
    cupys = [f"{version(x)} ({x})" for x in diagnosis.cupy_packages()]
    yield "CuPy", ", ".join(cupys) or "not installed"
    yield "cuda-bindings", version("cuda-bindings") or "not installed"
    try:
        yield "NVRTC", nvrtc.version()
    except CuflashError as error:
        yield "NVRTC", str(error)


def version(package: str) -> str:
    """A package's version, or ''."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _revision() -> str:
    """The commit of a checkout, or ''."""
    if not (_CHECKOUT / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=_CHECKOUT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"(git {done.stdout.strip()})"


def of_gpu(cupy: Any, index: int) -> dict[str, Any]:
    """What tells a GPU from others."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(index)
    return {
        "name": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "num_sms": properties["multiProcessorCount"],
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "driver": driver_version(),
        "driver_cuda": diagnosis.release(runtime.driverGetVersion()),
        "runtime_cuda": diagnosis.release(runtime.runtimeGetVersion()),
    }


def driver_version() -> str:
    """The driver's own version, such as 580.159.04, where it says so."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    words = text.partition("\n")[0].split()
    numbers = (x for x in words if x[:1].isdigit() and "." in x)
    return next(numbers, "")


def num_cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
