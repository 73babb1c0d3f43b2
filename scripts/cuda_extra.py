"""Print the extra of setup.cfg that matches this machine's GPU.

`cuda12` or `cuda13`, by the CUDA version of the driver; nothing if there is no
GPU. Queries the driver itself, because a driver may be installed without
nvidia-smi.
"""

from __future__ import annotations

import ctypes
import sys


def driver_version() -> int | None:
    """Return the driver's major CUDA version; None without driver or GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    # Each returns 0 on success; cuInit fails without a GPU.
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGetCount(ctypes.byref(count))
        or driver.cuDriverGetVersion(ctypes.byref(version))
    )
    if failed or not count.value:
        return None
    return version.value // 1000


def extra_for(version: int | None) -> str:
    """Return the extra for a driver of this major version; "" for None."""
    if version is None or version < 12:
        return ""
    return "cuda12" if version == 12 else "cuda13"


def main() -> None:
    version = driver_version()
    extra = extra_for(version)
    if version is not None and not extra:
        print(
            f"The GPU's driver is for CUDA {version}; cuflash needs one for "
            "CUDA 12 or 13 and will run on the CPU.",
            file=sys.stderr,
        )
    print(extra)


if __name__ == "__main__":
    main()
