"""The device, versions and date of a measurement."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "cuflash", "cupy-cuda13x", "cupy-cuda12x", "torch", "flash-attn",
    "flash_attn_3", "flash-attn-4", "flashinfer-python", "jax",
)  # fmt: skip


def find_gpu() -> str | None:
    """Return why there is no GPU; None if there is one."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except Exception as error:  # the exception depends on what is missing
        return str(error).partition("\n")[0]
    return None


def describe() -> dict:
    """Return device, driver, versions, date and commit."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    cuda = runtime.driverGetVersion()
    return {
        "device": properties["name"].decode(),
        "num_sms": properties["multiProcessorCount"],
        "driver": _first_line(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _first_line("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in PACKAGES if _version(name)
        },
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
