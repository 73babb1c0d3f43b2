"""From a planned kernel to a program for this machine, and its child process.

A kernel's text is compiled by g++ or clang++, with ``ptx_host.h`` in place
of ``common/ptx.cuh``, and linked with ``engine.cpp`` to one executable, which
is
kept in the cache folder as cubins are. Each launch is a process of its own,
so that no fault of a kernel can take this one down.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from cuflash import folders
from cuflash.build import cache, source
from cuflash.errors import CompileError, KernelFault
from cuflash.plan import Device, KernelPlan

FOLDER = Path(__file__).parent
TWINS = {"common/ptx.cuh": FOLDER / "ptx_host.h"}

# The instrumentation that -fsanitize=thread adds is what engine.cpp defines:
# a call before each access to memory. The program is linked without it.
_FLAGS = (
    "-std=c++17",
    "-fno-pie",  # addresses are those that addr2line knows
    "-g1",
    "-gdwarf-4",  # binutils 2.40 takes file 1 of DWARF 5 for file 0
)
_ENGINE_FLAGS = (*_FLAGS, "-O2")
_KERNEL_FLAGS = (
    *_FLAGS,
    "-O1",
    "-ffp-contract=fast",  # as NVRTC does
    "-fsanitize=thread",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-psabi",  # of GCC 4.6
)
_LINK_FLAGS = ("-no-pie",)
# A third of the default linker's time. It is no longer maintained, so the
# default one follows where it fails.
_GOLD = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
_FAULT = 70  # the exit status with which the engine reports one
_LONGEST_TAIL = 2000  # characters of what a child said last


# ---- Compiling ----


def host_compiler() -> tuple[str, ...]:
    """The command that compiles C++ here.

    Raises
    ------
    CompileError
        If there is none.
    """
    wanted = os.environ.get("CXX")
    for command in [wanted] if wanted else ["g++", "clang++"]:
        words = shlex.split(command)
        program = shutil.which(words[0]) if words else None
        if program:
            return (program, *words[1:])
    tried = (
        f"the environment variable CXX is {wanted!r}, which is no program"
        if wanted
        else "neither g++ nor clang++ was found"
    )
    raise CompileError(
        "the emulator compiles kernels with a C++ compiler, of which there"
        f" is none: {tried}; install one (Debian and Ubuntu: apt install g++;"
        " Fedora: dnf install gcc-c++) or set CXX"
    )


def text(kernel: KernelPlan) -> str:
    """What a C++ compiler gets of a kernel."""
    return "\n".join([
        '#include "cuda_host.h"',
        source.build(kernel, twins=TWINS),
        f"EMULATOR_ENTRY({kernel.entry})\n",
    ])  # fmt: skip


def _text_flags(arch: str) -> tuple[str, ...]:
    """What the text asks for."""
    return f"-D__CUDA_ARCH__={10 * Device(arch).capability}", f"-I{FOLDER}"


def explaining(arch: str) -> tuple[str, ...]:
    """The command that notes all types of a text, for `faults`."""
    command = host_compiler()
    return (
        *command,
        "-std=c++17",
        "-w",
        "-g",
        "-gdwarf-4",
        "-fno-eliminate-unused-debug-types",
        *_text_flags(arch),
        "-c",
    )


def executable(
    kernel: KernelPlan, arch: str, flags: tuple[str, ...] = ()
) -> Path:
    """The program that runs a kernel, compiled now if it is not there.

    Parameters
    ----------
    kernel : plan.KernelPlan
    arch : str
        As ``sm_90a``: the text may ask for it.
    flags : tuple of str, optional
        Further ones, to compile and to link with. With any, the folder in
        which the kernel was compiled stays beside the program, under its
        name and ``.build``: it has what ``--coverage`` writes.

    Raises
    ------
    CompileError
        If there is no compiler, or the kernel does not compile.
    """
    command = host_compiler()
    built = text(kernel)
    compiling = (
        *command,
        *_KERNEL_FLAGS,
        *_own_flags(command),
        *_text_flags(arch),
        *flags,
    )
    linking = (*command, *_LINK_FLAGS, *flags)

    def build(path: Path) -> None:
        folder = path.with_suffix(".build")
        folder.mkdir(exist_ok=True)
        try:
            written, made = folder / "kernel.cpp", folder / "kernel.o"
            written.write_text(built)
            done = _call(*compiling, "-c", written, "-o", made)
            if done.returncode == 0:
                program = folder / "program"
                for linker in dict.fromkeys([_GOLD, ()]):
                    done = _call(
                        *linking, *linker, made, engine, "-o", program
                    )
                    if done.returncode == 0:
                        break
            if done.returncode:
                raise CompileError(_explain(kernel, command, built, done))
            os.replace(program, path)
        finally:
            if not flags:
                shutil.rmtree(folder)

    engine = _engine(command)
    key = (built, compiling, linking, engine.name)
    return _kept(f"{kernel.entry}_{_hash(key)}", build)


def _engine(command: tuple[str, ...]) -> Path:
    """engine.cpp as an object file.

    Its name stands for all the files of the emulator.
    """
    compiling = (*command, *_ENGINE_FLAGS)

    def build(path: Path) -> None:
        made = path.with_suffix(".o")
        done = _call(*compiling, "-c", FOLDER / "engine.cpp", "-o", made)
        if done.returncode:
            raise CompileError(
                "the emulator's engine.cpp does not compile by"
                f" {command[0]}:\n{_log(done)}"
            )
        os.replace(made, path)

    files = sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")])
    texts = [file.read_text() for file in files]
    key = (compiling, _version(command), texts)
    return _kept(f"engine_{_hash(key)}", build)


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    return _call(*command, "--version").stdout


@functools.cache
def _own_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """The flags that depend on the compiler and on this machine."""
    if "clang" in _version(command):
        flags = ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
        flags += ["-fsanitize=array-bounds"]
    else:
        flags = ["--param=tsan-instrument-func-entry-exit=0"]
        flags += ["-fsanitize=bounds-strict"]
        # At -O1 g++ would fuse no multiply-adds, which NVRTC does.
        flags += ["-fexpensive-optimizations"]
        # Of variables -g1 says nothing: to track them is a third of the time.
        flags += ["-fno-var-tracking"]
    # What a kernel leaves unset is then not zero by chance. From GCC 12 on.
    unset = "-ftrivial-auto-var-init=pattern"
    if _call(*command, unset, "-x", "c++", "-E", os.devnull).returncode == 0:
        flags.append(unset)
    if platform.machine() == "x86_64":
        processors = Path("/proc/cpuinfo").read_text()
        if re.search(r"^flags\s*:.*\bfma\b", processors, re.M):
            flags.append("-mfma")
    return tuple(flags)


def _call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )


def _hash(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:40]


def _kept(name: str, build: Callable[[Path], None]) -> Path:
    """The file of that name in the cache folder, built if it is not there."""
    return cache.kept(f"cuflash_emulator/{name}", build)


def _log(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit status {done.returncode}"


def _explain(
    kernel: KernelPlan,
    command: tuple[str, ...],
    text: str,
    done: subprocess.CompletedProcess[str],
) -> str:
    """The compiler's message and the numbered source around the fault."""
    constants = ", ".join(f"{n}={value}" for n, value in kernel.constants)
    log = _log(done)
    words = [
        f"{kernel.file} does not compile on the CPU by {command[0]}"
        f" ({constants}):",
        log,
    ]
    fault = re.search(r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error:", log, re.M)
    if fault:
        words += source.excerpt(text, fault[1], int(fault[2]))
    return "\n".join(words)


# ---- Running ----


def run(
    program: Path,
    folder: Path,
    entry: str,
    timeout: float,
    explain: Callable[[str], str] = str,
) -> None:
    """Run a launch to its end.

    Parameters
    ----------
    program : Path
        As `executable` returned it.
    folder : Path
        With ``launch.txt`` and ``memory.bin``.
    entry : str
        The kernel's name, for messages.
    timeout : float
        In seconds.
    explain : callable, optional
        What becomes of the engine's message of a fault.

    Raises
    ------
    KernelFault
        If the kernel did what it must not, or did not come to its end.
    CompileError
        If the program cannot be started.
    """
    try:
        done = subprocess.run(
            [program, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        said = _tail(error.stderr)
        raise KernelFault(
            entry, f"did not end within {timeout:g} s{said}"
        ) from None
    except OSError as error:  # a file system without permission to execute
        raise CompileError(
            f"a compiled kernel cannot be started ({error});"
            f" {folders.ADVICE} and programs run from"
        ) from error
    if done.returncode == _FAULT:
        message = done.stderr.decode(errors="replace").strip()
        raise KernelFault(entry, explain(message))
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise KernelFault(entry, f"died of {name}{_tail(done.stderr)}")
    if done.returncode:
        raise KernelFault(
            entry, f"ended with status {done.returncode}{_tail(done.stderr)}"
        )


def _tail(said: bytes | None) -> str:
    text = (said or b"").decode(errors="replace").strip()
    return f": {text[-_LONGEST_TAIL:]}" if text else ""
