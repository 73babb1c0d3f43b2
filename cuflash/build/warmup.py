"""Compiles the default kernels at import, in a child process.

The import does not wait for the child. docs/internals/host.md, "Compiling at
import", explains why it is a process and not a thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cuflash import diagnosis, folders, settings
from cuflash.errors import UnsupportedError, ValueRangeError

from . import cache

if TYPE_CHECKING:
    import subprocess

PACKAGE = Path(__file__).parent.parent

_CHILD = """\
import sys
sys.path[:] = {path!r}
from cuflash.__main__ import main
sys.exit(main(["warmup"]))
"""


def start_default_compiles() -> None:
    """Start compiling the default kernels if there is a GPU.

    The environment variable ``CUFLASH_COMPILE`` selects the mode: unset or
    ``background``, a child process compiles and the import does not wait;
    ``eager``, the import waits for the child; ``lazy``, every kernel is
    compiled on first use. The child ends with this process at the latest.
    """
    try:
        how = settings.read("CUFLASH_COMPILE") or "background"
    except ValueRangeError:  # the first call raises it
        return
    # os.path.exists returns False for an unreadable folder; Path may raise.
    if how == "lazy" or not _may_have_gpu() or os.path.exists(_stamp()):
        return
    if how == "background" and not cache.can_keep():
        return  # the first call that compiles warns
    child = _start_child()
    if child and how == "eager" and child.wait() != 0:
        warnings.warn(
            "not all default kernels could be compiled; run python -m"
            " cuflash warmup to see why",
            RuntimeWarning,
            stacklevel=2,
        )


def remember_default_compiles() -> None:
    """Create the stamp file: all default kernels are compiled.

    Imports then start no child until the package, its neighbours in
    site-packages or the GPUs change. A stale stamp only costs time: missing
    kernels are compiled on first use.
    """
    folders.make(folders.cache_folder())
    _stamp().touch()


def may_have_driver() -> bool:
    """Whether the files of a GPU's driver exist, and its GPUs are visible."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if sys.platform == "win32":
        system = os.environ.get("SystemRoot", r"C:\Windows")
        drivers = [os.path.join(system, "System32", "nvcuda.dll")]
    else:
        drivers = ["/dev/nvidiactl", "/dev/dxg"]  # the latter under WSL
    return any(map(os.path.exists, drivers))


def _may_have_gpu() -> bool:
    """Whether the files of CuPy and of a GPU's driver exist."""
    return may_have_driver() and _cupy() is not None


def _cupy() -> Path | None:
    """The folder of CuPy, found without importing it."""
    spec = find_spec("cupy")
    return Path(spec.origin).parent if spec and spec.origin else None


def _stamp() -> Path:
    """The stamp file; its name is a hash of what the kernels depend on."""
    import hashlib  # here, to keep `import cuflash` fast

    cupy = _cupy()
    files = [
        *PACKAGE.glob("**/*.py"),
        *PACKAGE.glob("kernels/**/*.cu*"),
        *PACKAGE.glob("plans/tile_tables/*"),
        *folders.files(folders.tile_tables(), "*.json"),
        # site-packages: its time changes if NVRTC, say, is upgraded
        *([cupy.parent] if cupy else []),
    ]
    known = [
        sorted((str(file), file.stat().st_mtime_ns) for file in files),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        sorted(map(str, Path("/proc/driver/nvidia/gpus").glob("*"))),
    ]
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:40]
    return folders.cache_folder() / f"cuflash_{digest}.compiled"


def _start_child() -> subprocess.Popen | None:
    """Start ``python -m cuflash warmup`` with this process's sys.path."""
    import subprocess  # here, to keep `import cuflash` fast

    python = Path(sys.executable or "").name.lower()
    if getattr(sys, "frozen", False) or not python.startswith("python"):
        return None  # an embedding program would start itself
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path)],
            env={**os.environ, "CUFLASH_COMPILE": "lazy"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A program without a console would get one, on Windows.
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError:  # no process: kernels are compiled on first use
        return None
    atexit.register(_stop_child, child, os.getpid())
    return child


def _stop_child(child: subprocess.Popen, parent: int) -> None:
    if os.getpid() == parent:  # not in a fork
        child.kill()
        child.wait()


# ---- The GPUs of this machine ----


def gpus() -> list[str]:
    """The names of the CUDA devices, in the order of their indices.

    Raises
    ------
    UnsupportedError
        If there is no device, or CuPy cannot be imported.
    """
    try:
        import cupy
    except (ImportError, OSError) as error:
        raise UnsupportedError(diagnosis.no_cupy(error)) from error
    runtime = cupy.cuda.runtime
    try:
        return [
            runtime.getDeviceProperties(index)["name"].decode()
            for index in range(runtime.getDeviceCount())
        ]
    except RuntimeError as error:
        numbers = map(_number, ("driverGetVersion", "runtimeGetVersion"))
        raise UnsupportedError(diagnosis.no_device(error, *numbers)) from error


def _number(name: str) -> int:
    """A version of CUDA; 0 if it cannot be asked."""
    import cupy

    try:
        return int(getattr(cupy.cuda.runtime, name)())
    except (AttributeError, RuntimeError):
        return 0
