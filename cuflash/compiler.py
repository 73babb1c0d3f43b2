"""NVRTC and CuPy's modules: from a planned kernel to a function on the GPU.

A kernel's text is compiled by NVRTC (through cuda-bindings, which needs no
GPU) to a cubin in CuPy's cache folder, and CuPy loads that file. The name of
the file is a hash of all that the cubin depends on: the text, the options and
the version of NVRTC. Whoever compiles a kernel holds a lock on its name, so
that another thread or process that needs the same kernel waits for this one
kernel and then reads it.

At import the default kernels are compiled in a child process, started at
once and not waited for. It is a process and not a thread for the reasons in
docs/internals/host.md, "Compiling at import".
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuflash import cache, folders, settings, source
from cuflash.errors import CompileError, UnsupportedError, ValueRangeError

if TYPE_CHECKING:
    from cuflash.plan import Device, KernelPlan

# ---- Compiling: text to cubin, by NVRTC ----


def options(kernel: KernelPlan, arch: str) -> tuple[str, ...]:
    """The options that a kernel is compiled with.

    Parameters
    ----------
    kernel : plan.KernelPlan
        ``ptxas_level`` is read.
    arch : str
        As ``sm_90a``: the suffix gives access to wgmma and setmaxnreg.
    """
    return (
        "-std=c++17",
        "-default-device",
        f"-arch={arch}",
        f"--ptxas-options=-O{kernel.ptxas_level}",
    )


@dataclass(frozen=True)
class Report:
    """What the compiler says of a kernel.

    Attributes
    ----------
    registers : int
        Registers of a thread.
    shared_bytes : int
        Shared memory of a block: what the plan asks for at the launch and
        what the kernel declares itself.
    spill_bytes : int
        Bytes of registers that a thread stores to memory for want of room.
    seconds : float
        Time that the compiler took.
    warnings : tuple of str
        Its warnings.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    seconds: float
    warnings: tuple[str, ...]


def report(kernel: KernelPlan, arch: str) -> Report:
    """Compile a kernel, needing no GPU, and say what became of it.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    start = time.perf_counter()
    _, log = _compile(kernel, arch, "--ptxas-options=-v", *_afresh())
    return Report(
        registers=max(_numbers(r"Used (\d+) registers", log)),
        shared_bytes=kernel.shared_bytes
        + max(_numbers(r"(\d+) bytes smem", log)),
        spill_bytes=sum(_numbers(r"(\d+) bytes spill stores", log)),
        seconds=time.perf_counter() - start,
        warnings=tuple(
            line
            for line in log.splitlines()
            # C7512, C7514: of wgmma, which the assembler calls information.
            if "warning" in line or "serialized" in line
        ),
    )


def _afresh() -> tuple[str, ...]:
    """The option against NVRTC's own cache, if it has one.

    From 12.9 on NVRTC keeps what it compiled in the driver's cache, and
    then there is no log of what a compilation would say.
    """
    version = tuple(map(int, nvrtc_version().split(".")))
    return ("--no-cache",) if version >= (12, 9) else ()


def _numbers(pattern: str, log: str) -> list[int]:
    return [0, *map(int, re.findall(pattern, log))]


def _nvrtc() -> Any:
    """cuda.bindings.nvrtc, if it and the library behind it are there."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise CompileError(
            "NVRTC, which compiles the kernels, was not found; install"
            " cuflash[cuda13] or cuflash[cuda12], whichever fits the driver"
            f" ({error})"
        ) from error
    return nvrtc


def nvrtc_version() -> str:
    """Version of NVRTC, as ``13.0``; CompileError if there is none."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def nvrtc_capabilities() -> list[int]:
    """Compute capabilities that NVRTC compiles for, 90 meaning 9.0."""
    _, capabilities = _nvrtc().nvrtcGetSupportedArchs()
    return list(capabilities)


def _compile(kernel: KernelPlan, arch: str, *more: str) -> tuple[bytes, str]:
    """A kernel's cubin and the compiler's log."""
    nvrtc = _nvrtc()
    text = source.build(kernel)
    _, program = nvrtc.nvrtcCreateProgram(
        text.encode(), kernel.file.encode(), 0, [], []
    )
    try:
        flags = [flag.encode() for flag in (*options(kernel, arch), *more)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        message = log.rstrip(b"\0").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_explain(kernel, arch, text, result, message))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin, message
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _explain(
    kernel: KernelPlan, arch: str, text: str, result: Any, log: str
) -> str:
    """The compiler's message and the numbered source around the fault."""
    constants = ", ".join(f"{n}={value}" for n, value in kernel.constants)
    words = [
        f"{kernel.file} does not compile for {arch} ({constants}):",
        log.strip() or result.name,
    ]
    fault = re.search(r"^(\S+)\((\d+)\): (?:catastrophic )?error", log, re.M)
    if fault:
        words += source.excerpt(text, fault[1], int(fault[2]))
    return "\n".join(words)


# ---- Keeping: a cubin a file, compiled once ----


def cubin_file(kernel: KernelPlan, arch: str) -> Path:
    """The file with a kernel's binary, compiled now if it is not there.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    key = repr((source.build(kernel), options(kernel, arch), nvrtc_version()))
    name = f"cuflash_{hashlib.sha256(key.encode()).hexdigest()[:40]}"

    def build(path: Path) -> None:
        path.write_bytes(_compile(kernel, arch)[0])

    return cache.kept(f"{name}.cubin", build)


# ---- Loading: a cubin to a function of the current device, by CuPy ----

_functions: dict[tuple[int, KernelPlan], Any] = {}


def function(kernel: KernelPlan, device: Device) -> Any:
    """The function of a planned kernel on the current device.

    Compiled, read from the cache or (a second time) remembered. Waits for
    nothing but this kernel.

    Parameters
    ----------
    kernel : plan.KernelPlan
    device : plan.Device
        What the current CUDA device is.

    Returns
    -------
    cupy.RawKernel
        Allowed to use the shared memory that the plan asks for.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), kernel)
    found = _functions.get(key)
    if found is None:
        found = _functions.setdefault(key, _load(kernel, device.arch))
    return found


def _load(kernel: KernelPlan, arch: str) -> Any:
    import cupy

    path = cubin_file(kernel, arch)
    with _also_while_capturing():
        module = cupy.RawModule(path=str(path))
        loaded = module.get_function(kernel.entry)
        loaded.max_dynamic_shared_size_bytes = kernel.shared_bytes
    return loaded


@contextlib.contextmanager
def _also_while_capturing() -> Iterator[None]:
    """Let this thread load a module while a stream records a CUDA graph."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    try:
        yield
    finally:
        if error == driver.CUresult.CUDA_SUCCESS:
            driver.cuThreadExchangeStreamCaptureMode(before)


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


# ---- Compiling the default kernels at import ----

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
    package, cupy = Path(__file__).parent, _cupy()
    files = [
        *package.glob("*.py"),
        *package.glob("kernels/*"),
        *package.glob("tile_tables/*"),
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
