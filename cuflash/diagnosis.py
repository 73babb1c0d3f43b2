"""What is wrong with this machine's CUDA, and what to do about it.

Messages for faults of an installation that other libraries name by a number:
a driver that is too old, two CuPys, none. Imports no other library.
"""

from __future__ import annotations

import os
from importlib import metadata

from cuflash import folders

EXTRAS = (
    "install cuflash[cuda13] or cuflash[cuda12], whichever matches the driver"
)
# CuPy's packages; all of them install the module cupy.
_CUPYS = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
_TOO_OLD = ("InsufficientDriver", "driver version is insufficient")


def cupy_packages() -> list[str]:
    """The installed packages that bring CuPy."""
    found = []
    for name in _CUPYS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def two_cupys() -> str:
    """What to do if several packages bring CuPy; ''  if one or none does."""
    names = cupy_packages()
    if len(names) < 2:
        return ""
    return (
        f"{' and '.join(names)} are installed, which overwrite each other's"
        f" files: pip uninstall {' '.join(names)}, then {EXTRAS}"
    )


def no_cupy(error: Exception) -> str:
    """The message for an error of ``import cupy``."""
    if isinstance(error, OSError):
        return folders.why_no_cupy(error)
    advice = two_cupys() or EXTRAS
    return (
        "CuPy, which cuflash needs for a GPU, cannot be imported;"
        f" {advice} ({error})"
    )


def no_device(error: Exception, driver: int, runtime: int) -> str:
    """The message for an error of CUDA's runtime when it is first asked.

    Parameters
    ----------
    driver, runtime : int
        The versions of CUDA that the driver supports and that CuPy uses, as
        CUDA writes them: 13000 is 13.0. 0: not known.
    """
    said = str(error)
    if any(x in said for x in _TOO_OLD) or 0 < driver < runtime // 1000 * 1000:
        return _old_driver(driver, runtime, said)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        said += f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
    return f"no CUDA device ({said})"


def _old_driver(driver: int, runtime: int, said: str) -> str:
    needed = release(runtime)
    if not driver:  # CUDA says the same if there is none
        return (
            "there is no NVIDIA driver, or it is too old: install one for"
            f" CUDA {needed}, which CuPy needs ({said})"
        )
    extra = f"cuflash[cuda{driver // 1000}]"
    other = f", or install {extra}" if driver >= 12000 else ""
    return (
        f"the NVIDIA driver supports CUDA {release(driver)}, CuPy needs CUDA"
        f" {needed}: update the driver{other} ({said})"
    )


def not_loaded(error: Exception, nvrtc: str, driver: int) -> str:
    """Why a driver does not load a kernel; '' if nothing tells.

    Within a major version of CUDA, drivers load what a newer compiler made.
    """
    if not driver or int(nvrtc.partition(".")[0]) <= driver // 1000:
        advice = two_cupys()
        if not advice:
            return ""
        return f"a kernel cannot be loaded ({error}): {advice}"
    return (
        f"the NVIDIA driver supports CUDA {release(driver)} and cannot load a"
        f" kernel that NVRTC {nvrtc} compiled: update the driver, or install"
        f" cuflash[cuda{driver // 1000}] alone ({error})"
    )


def release(version: int) -> str:
    """CUDA's number as a text: 12040 is 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"
