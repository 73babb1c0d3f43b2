"""NVRTC and CuPy's modules: from a planned kernel to a function on the GPU.

NVRTC (through cuda-bindings, without a GPU) compiles a kernel's text to a
cubin in the cache folder, and CuPy loads that file. The file's name is a hash
of everything the cubin depends on: the text, the options and the version of
NVRTC. A lock on the name lets other threads and processes that need the same
kernel wait for this one compilation, then read the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuflash import diagnosis
from cuflash.errors import CompileError

from . import cache, source

if TYPE_CHECKING:
    from cuflash.plans.plan import Device, KernelPlan

# ---- Compiling: text to cubin, by NVRTC ----


def options(kernel: KernelPlan, arch: str) -> tuple[str, ...]:
    """NVRTC's options for a kernel.

    Parameters
    ----------
    kernel : plan.KernelPlan
        Its ``ptxas_level`` is used.
    arch : str
        Such as ``sm_90a``: the suffix enables wgmma and setmaxnreg.
    """
    return (
        "-std=c++20",
        "-default-device",
        f"-arch={arch}",
        f"--ptxas-options=-O{kernel.ptxas_level}",
    )


@dataclass(frozen=True)
class Report:
    """The compiler's report about a kernel.

    Attributes
    ----------
    registers : int
        Registers per thread.
    shared_bytes : int
        Shared memory of a block: the plan's dynamic shared memory plus the
        static shared memory that the kernel declares.
    spill_bytes : int
        Bytes of registers that a thread spills to memory.
    seconds : float
        Compile time.
    warnings : tuple of str
        The compiler's warnings.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    seconds: float
    warnings: tuple[str, ...]


def report(kernel: KernelPlan, arch: str) -> Report:
    """Compile a kernel, without a GPU, and report its resources.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    start = time.perf_counter()
    _, log = _compile(kernel, arch, "--ptxas-options=-v", *_no_cache())
    return Report(
        registers=max(_numbers(r"Used (\d+) registers", log)),
        shared_bytes=kernel.shared_bytes
        + max(_numbers(r"(\d+) bytes smem", log)),
        spill_bytes=sum(_numbers(r"(\d+) bytes spill stores", log)),
        seconds=time.perf_counter() - start,
        warnings=tuple(
            line
            for line in log.splitlines()
            # C7512 and C7514, about wgmma, are only info messages of ptxas.
            if "warning" in line or "serialized" in line
        ),
    )


def _no_cache() -> tuple[str, ...]:
    """The option that disables NVRTC's own cache, if it has one.

    From 12.9 on, NVRTC caches compiled kernels in the driver's cache; a
    cached result has no log.
    """
    release = tuple(map(int, version().split(".")))
    return ("--no-cache",) if release >= (12, 9) else ()


def _numbers(pattern: str, log: str) -> list[int]:
    return [0, *map(int, re.findall(pattern, log))]


def _nvrtc() -> Any:
    """cuda.bindings.nvrtc; CompileError if it or NVRTC is missing."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError, OSError) as error:  # OSError: a DLL
        raise CompileError(
            "NVRTC, which compiles the kernels, was not found;"
            f" {diagnosis.EXTRAS} ({error})"
        ) from error
    return nvrtc


def version() -> str:
    """NVRTC's version, such as ``13.0``; CompileError if it is missing."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def capabilities() -> list[int]:
    """The compute capabilities that NVRTC supports; 90 means 9.0."""
    _, supported = _nvrtc().nvrtcGetSupportedArchs()
    return list(supported)


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
            raise CompileError(
                source.explain(
                    kernel, text, f"for {arch}",
                    message.strip() or result.name,
                    r"^(\S+)\((\d+)\): (?:catastrophic )?error",
                )
            )  # fmt: skip
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin, message
    finally:
        nvrtc.nvrtcDestroyProgram(program)


# ---- Caching: one file per cubin, compiled once ----


def cubin_file(kernel: KernelPlan, arch: str) -> Path:
    """The file with a kernel's cubin, compiled now if it does not exist.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    key = repr((source.build(kernel), options(kernel, arch), version()))
    name = f"cuflash_{hashlib.sha256(key.encode()).hexdigest()[:40]}"

    @functools.cache  # a full disk takes a second path
    def cubin() -> bytes:
        return _compile(kernel, arch)[0]

    def build(path: Path) -> None:
        path.write_bytes(cubin())

    return cache.kept(f"{name}.cubin", build)


# ---- Loading: CuPy makes a cubin a function of the current device ----

_functions: dict[tuple[int, KernelPlan], Any] = {}


def function(kernel: KernelPlan, device: Device) -> Any:
    """The function of a planned kernel on the current device.

    Compiles the kernel or reads it from the cache; a repeated call returns
    the same function. It waits for no other kernel.

    Parameters
    ----------
    kernel : plan.KernelPlan
    device : plan.Device
        The current CUDA device.

    Returns
    -------
    cupy.RawKernel
        With the plan's dynamic shared memory enabled.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), kernel)
    loaded = _functions.get(key)
    if loaded is None:
        loaded = _functions.setdefault(key, _load(kernel, device.arch))
    return loaded


def _load(kernel: KernelPlan, arch: str) -> Any:
    import cupy

    path = cubin_file(kernel, arch)
    try:
        with _also_while_capturing():
            module = cupy.RawModule(path=str(path))
            loaded = module.get_function(kernel.entry)
            loaded.max_dynamic_shared_size_bytes = kernel.shared_bytes
    except RuntimeError as error:  # such as CuPy's CUDADriverError
        driver = cupy.cuda.runtime.driverGetVersion()
        why = diagnosis.not_loaded(error, version(), driver)
        if not why:
            raise
        raise CompileError(why) from error
    return loaded


@contextlib.contextmanager
def _also_while_capturing() -> Iterator[None]:
    """Let this thread load a module while a stream is being captured."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    try:
        yield
    finally:
        if error == driver.CUresult.CUDA_SUCCESS:
            driver.cuThreadExchangeStreamCaptureMode(before)
