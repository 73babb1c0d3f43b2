"""The default kernels, compiled at import in a child process.

The child is started at once and not waited for. It is a process and not a
thread for the reasons in docs/internals/host.md, "Compiling at import".
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cuflash import folders, settings
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
    """Have the default kernels compiled if there is a GPU.

    The environment variable ``CUFLASH_COMPILE`` says how: unset or
    ``background``, a child process does it and nobody waits for it;
    ``eager``, it is waited for; ``lazy``, nothing is compiled before its
    first use. The child ends, at the latest, with this process.
    """
    try:
        how = settings.read("CUFLASH_COMPILE") or "background"
    except ValueRangeError:  # which the first call raises
        return
    # os.path: a folder that this user may not look into is none.
    if how == "lazy" or not _may_have_gpu() or os.path.exists(_stamp()):
        return
    if how == "background" and not cache.can_keep():
        return  # the first call that compiles warns of it
    child = _start_child()
    if child and how == "eager" and child.wait() != 0:
        warnings.warn(
            "the default kernels could not all be compiled; python -m"
            " cuflash warmup says why",
            RuntimeWarning,
            stacklevel=2,
        )


def remember_default_compiles() -> None:
    """Note that this machine's default kernels are all compiled.

    An import has then no child to start, until the package, its neighbours
    or the GPUs change. A note that is out of date costs time alone: what it
    takes for compiled is compiled on first use.
    """
    folders.make(folders.cache_folder())
    _stamp().touch()


def _may_have_gpu() -> bool:
    """Whether CuPy and a GPU's driver are there, as far as files tell."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if sys.platform == "win32":
        system = os.environ.get("SystemRoot", r"C:\Windows")
        drivers = [os.path.join(system, "System32", "nvcuda.dll")]
    else:
        drivers = ["/dev/nvidiactl", "/dev/dxg"]  # the latter under WSL
    return any(map(os.path.exists, drivers)) and _cupy() is not None


def _cupy() -> Path | None:
    """Where CuPy is installed, without importing it."""
    spec = find_spec("cupy")
    return Path(spec.origin).parent if spec and spec.origin else None


def _stamp() -> Path:
    """The file that tells that all is compiled, named by what that means."""
    import hashlib  # here, to keep the import of cuflash short

    cupy = _cupy()
    files = [
        *PACKAGE.glob("**/*.py"),
        *PACKAGE.glob("kernels/**/*.cu*"),
        *PACKAGE.glob("tile_tables/*"),
        *folders.files(folders.tile_tables(), "*.json"),
        # site-packages: CuPy's neighbours, NVRTC among them
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
    """Start ``python -m cuflash warmup``, as found by this process."""
    import subprocess  # here, to keep the import of cuflash short

    python = Path(sys.executable or "").name.lower()
    if getattr(sys, "frozen", False) or not python.startswith("python"):
        return None  # a program with Python inside would start itself
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path)],
            env={**os.environ, "CUFLASH_COMPILE": "lazy"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:  # no process to be had: every first use compiles its own
        return None
    atexit.register(_stop_child, child, os.getpid())
    return child


def _stop_child(child: subprocess.Popen, parent: int) -> None:
    if os.getpid() == parent:  # and not a fork of it
        child.kill()
        child.wait()


# ---- The GPUs of this machine ----


def gpus() -> list[str]:
    """The names of the CUDA devices, by their index.

    Raises
    ------
    UnsupportedError
        If there is none, or no CuPy to reach it by.
    """
    try:
        import cupy

        runtime = cupy.cuda.runtime
        return [
            runtime.getDeviceProperties(index)["name"].decode()
            for index in range(runtime.getDeviceCount())
        ]
    except ImportError as error:
        raise UnsupportedError(
            "CuPy, which reaches the GPU, cannot be imported; install"
            " cuflash[cuda13] or cuflash[cuda12], whichever fits the driver"
            f" ({error})"
        ) from error
    except OSError as error:
        raise UnsupportedError(folders.why_no_cupy(error)) from error
    except RuntimeError as error:
        raise UnsupportedError(f"no CUDA device ({error})") from error
