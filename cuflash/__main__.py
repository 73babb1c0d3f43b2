"""``python -m cuflash info | check | compile | warmup``."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args

from cuflash import __version__, folders, settings
from cuflash.build import cache, nvrtc, parallel, warmup
from cuflash.check import machine
from cuflash.errors import CuflashError, UnsupportedError
from cuflash.plans import tiles
from cuflash.plans.plan import (
    Device,
    KernelPlan,
    default_plans,
    device_of_arch,
    family_of,
    in_float32,
)
from cuflash.plans.record import must_not_spill
from cuflash.request.problem import DType, Problem

ARCHS = "sm_75,sm_80,sm_86,sm_89,sm_90a,sm_100,sm_120"
DTYPES: tuple[DType, ...] = get_args(DType)
NOT_CHECKED = 2  # the exit status of a check without calls
STOPPED = 130  # the exit status after Ctrl-C: 128 + SIGINT


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cuflash")
    parser.add_argument(
        "--version", action="version", version=f"cuflash {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, folders and settings")
    checking = commands.add_parser(
        "check",
        help="run calls of every kernel family on this machine's GPU, beside"
        " exact results, and print what a bug report needs",
    )
    checking.add_argument(
        "--device", type=int, metavar="N", help="the GPU (default: 0)"
    )
    checking.add_argument(
        "--quick", action="store_true", help="fewer calls and kernels"
    )
    checking.add_argument(
        "--json", action="store_true", help="print the report as JSON"
    )
    compiling = commands.add_parser(
        "compile",
        help="compile every default plan (no GPU needed) and print each"
        " kernel's registers, shared memory, spilled bytes and compile time",
    )
    compiling.add_argument(
        "--arch",
        default=ARCHS,
        help="architectures, separated by commas; sm_90 means sm_90a, which"
        " the Hopper kernels need (default: %(default)s)",
    )
    for command in (
        checking,
        compiling,
        commands.add_parser(
            "warmup", help="compile every default plan for this machine's GPUs"
        ),
    ):
        command.add_argument(
            "--jobs",
            type=int,
            default=machine.num_cpus(),
            help="kernels compiled at a time (default: the number of CPUs)",
        )
    options = parser.parse_args(arguments)
    _print_anything()
    try:
        if options.command == "info":
            return info()
        if options.command == "check":
            from cuflash.check.command import check  # imports the reference

            return check(
                options.device, options.quick, options.json, options.jobs
            )
        if options.command == "compile":
            archs = [arch.strip() for arch in options.arch.split(",")]
            return compile_for(archs, options.jobs)
        return warm_up(options.jobs)
    except CuflashError as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return NOT_CHECKED if options.command == "check" else 1
    except KeyboardInterrupt:
        print("cuflash: stopped", file=sys.stderr)
        return STOPPED


def _print_anything() -> None:
    """Escape what the output's encoding lacks, such as a folder's name.

    Windows gives a pipe and a file the encoding of its code page.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _kernels(device: Device) -> list[KernelPlan]:
    """The kernels of the default plans, without repeats."""
    plans = default_plans(device)
    return list(dict.fromkeys(k for plan in plans for k in plan.kernels))


def _describe(kernel: KernelPlan) -> str:
    """A kernel's name and constants in a few words."""
    known = dict(kernel.constants)
    words = [kernel.entry, str(known.get("Element", ""))]
    columns = known.get("HEAD_DIM") or known.get("DQ_COLUMNS")
    if columns:
        words.append(f"d {columns}")
    if "BLOCK_K" in known:
        words.append(f"{known['BLOCK_Q']}x{known['BLOCK_K']}")
    words += [n.lower() for n, v in known.items() if v is True]
    return " ".join(words)


# ---- compile ----


def compile_for(archs: list[str], jobs: int) -> int:
    """Compile every default plan and print one line per kernel.

    Returns
    -------
    int
        1 if a kernel does not compile, needs other shared memory than its
        plan says, or, with tensor cores, spills registers or has its wgmma
        instructions serialized by ptxas.
    """
    nvrtc.version()  # one clear error if NVRTC is missing
    devices = dict.fromkeys(_device_of_arch(arch) for arch in archs)
    tasks = [(k, device.arch) for device in devices for k in _kernels(device)]
    width = max(len(_describe(kernel)) for kernel, _ in tasks)
    line = f"{{:8}} {{:{width}}} {{:>9}} {{:>8}} {{:>6}} {{:>8}}  {{}}".format
    heads = ("arch", "kernel", "registers", "shared", "spill", "seconds", "")
    print(line(*heads).rstrip())
    faults, start = [], time.perf_counter()
    for kernel, arch, report in parallel.in_threads(nvrtc.report, tasks, jobs):
        fault = _fault(kernel, report)
        if fault:
            faults.append(f"{arch} {_describe(kernel)}: {fault}")
        numbers: tuple[object, ...] = ("-", "-", "-", "-")
        if isinstance(report, nvrtc.Report):
            r = report
            numbers = (
                r.registers, r.shared_bytes, r.spill_bytes, f"{r.seconds:.1f}"
            )  # fmt: skip
        mark = "FAILED" if fault else ""
        text = line(arch, _describe(kernel), *numbers, mark)
        print(text.rstrip(), flush=True)
    print(
        f"{len(tasks)} kernels in {time.perf_counter() - start:.1f} s,"
        f" NVRTC {nvrtc.version()}, {len(faults)} failed"
    )
    for fault in faults:
        print(f"\n{fault}")
    return 1 if faults else 0


def _device_of_arch(arch: str) -> Device:
    """The device, if NVRTC compiles for it and it has default plans."""
    name = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if not name:
        raise UnsupportedError(
            f"--arch got {arch!r}, expected architectures as in {ARCHS}"
        )
    known = nvrtc.capabilities()
    # sm_90 is the first that has a suffix a, sm_100 the first with an f.
    first = {"": 0, "a": 90, "f": 100}[name[2]]
    if int(name[1]) not in known or int(name[1]) < first:
        raise UnsupportedError(
            f"--arch got {arch!r}, expected one that NVRTC"
            f" {nvrtc.version()} compiles for:"
            f" {', '.join(f'sm_{capability}' for capability in known)}"
        )
    # An sm_90 GPU runs sm_90a code, as in `backends.cupy.device`.
    device = device_of_arch("sm_90a" if arch == "sm_90" else arch)
    if not _kernels(device):
        raise UnsupportedError(
            f"--arch got {arch!r}, expected sm_75 or newer, which have"
            " default plans"
        )
    return device


def _fault(kernel: KernelPlan, report: Any) -> str:
    """A description of what is wrong with a kernel, or ''."""
    if not isinstance(report, nvrtc.Report):
        return str(report)
    if report.shared_bytes != kernel.shared_bytes:
        return (
            f"needs {report.shared_bytes} bytes of shared memory, but its"
            f" plan says {kernel.shared_bytes}"
        )
    if must_not_spill(kernel.file) and report.spill_bytes:
        return f"spills {report.spill_bytes} bytes per thread"
    if any("serialized" in warning for warning in report.warnings):
        return "ptxas serialized its wgmma instructions"
    return ""


# ---- warmup ----


def warm_up(jobs: int) -> int:
    """Compile the default plans of this machine's GPUs into the cache.

    Returns
    -------
    int
        1 if a kernel does not compile or cannot be kept.
    """
    settings.check()
    devices = _devices()
    nvrtc.version()
    cache.require_folder()
    tasks = [(kernel, d.arch) for d in devices for kernel in _kernels(d)]
    tasks = list(dict.fromkeys(tasks))  # two GPUs may be the same model
    failed, start, kept = 0, time.perf_counter(), folders.cache_folder()
    for kernel, arch, result in parallel.in_threads(
        nvrtc.cubin_file, tasks, jobs
    ):
        said = ""
        if isinstance(result, Exception):
            said = f": {result}"
        elif kept not in result.parents:
            said = ": could not be kept"
        failed += bool(said)
        print(f"{arch} {_describe(kernel)}{said}", flush=True)
    print(
        f"{len(tasks)} kernels in {time.perf_counter() - start:.1f} s,"
        f" {failed} failed; they are in {kept}"
    )
    if not failed:
        warmup.remember_default_compiles()
    return 1 if failed else 0


def _devices() -> list[Device]:
    """This machine's supported GPUs; UnsupportedError if there are none."""
    names = warmup.gpus()
    from cuflash.backends import cupy as gpu  # gpus() has imported CuPy

    devices, reasons = [], []
    for index, name in enumerate(names):
        try:
            devices.append(gpu.device(index))
        except UnsupportedError as error:  # too old
            reasons.append(f"GPU {index} ({name}): {error}")
    if not devices:
        raise UnsupportedError("\n".join(["no GPU to compile for", *reasons]))
    for reason in reasons:
        print(f"skipped: {reason}", flush=True)
    return devices


# ---- info ----


def info() -> int:
    """Print versions, devices, folders and settings."""
    for name, text in _facts():
        print(f"{name:22} {text}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield from machine.versions()
    yield "NumPy arrays", "run on the CPU: " + ", ".join(DTYPES)
    try:
        names = warmup.gpus()
        if not names:
            yield "GPU", "none"
        for index, name in enumerate(names):
            yield f"GPU {index}", f"{name}: {_abilities(index)}"
    except CuflashError as error:
        yield "GPU", f"none: {error}"
    yield "emulator", _emulator()
    folder = folders.cache_folder()
    count = len(folders.files(folder, "cuflash_*.cubin"))
    yield "cache folder", f"{folder} ({count} compiled kernels)"
    try:
        cache.require_folder()
    except CuflashError as error:
        yield "warning", str(error)
    folder = folders.tile_tables()
    count = len(tiles.entries(folder))
    yield "tiles measured here", f"{count}, in {folder}" if count else "none"
    for name in settings.NAMES:
        yield name, _setting(name)


def _emulator() -> str:
    """The compiler of the emulator, or why there is none."""
    from cuflash.backends.emulator import runtime

    try:
        runtime.check_system()
        return f"compiles with {' '.join(runtime.host_compiler())}"
    except CuflashError as error:
        return str(error)


def _setting(name: str) -> str:
    """An environment variable's value, and whether it is a known one."""
    text = os.environ.get(name, "(not set)")
    try:
        if name in settings.VALUES:
            settings.read(name)
    except CuflashError:
        return f"{text} (unknown: expected {settings.expected(name)})"
    return text


def _abilities(index: int) -> str:
    """A GPU's architecture, SMs and the kernel family of each dtype."""
    from cuflash.backends import cupy as gpu

    try:
        device = gpu.device(index)
    except UnsupportedError as error:
        return str(error)
    words = [f"{device.arch}, {device.num_sms} SMs"]
    for dtype in DTYPES:
        problem = Problem("forward", dtype, 1, 1, 1, 1, 1, 64, 64, 1.0)
        try:
            family: str = family_of(problem, device)
            if in_float32(problem, device):
                family = "fma, in float32"
            words.append(f"{dtype} by {family}")
        except UnsupportedError:
            words.append(f"no {dtype}")
    return ", ".join(words)


def _end(status: int) -> None:
    """Exit; after Ctrl-C, without waiting for kernels still compiling.

    sys.exit would wait for their threads.
    """
    if status == STOPPED:
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _run() -> int:
    """Run the command; a reader that has left, as `head` does, is no fault."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    _end(_run())
