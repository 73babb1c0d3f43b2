"""Compiles a planned kernel for this machine and runs it in a child process.

g++ or clang++ compiles a kernel's text, with ``ptx_host.h`` in place of
``common/ptx.cuh``. The linker makes an image of it in the cache folder, which
the engine's program loads: a fourth of the time of a program for each kernel.
Each launch is a separate process, so that a kernel's fault cannot crash this
one.
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
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cuflash import folders
from cuflash.build import cache, source
from cuflash.errors import CompileError, KernelFault, UnsupportedError
from cuflash.plans.plan import Device, KernelPlan

FOLDER = Path(__file__).parent
TWINS = {"common/ptx.cuh": FOLDER / "ptx_host.h"}

# -fsanitize=thread inserts a call before each memory access; engine.cpp
# defines these functions. The program is linked without the sanitizer.
# C++17, in which g++ and clang++ take C++20's designated initialisers, whose
# headers take 0.1 s more of each program. No PIE, for addr2line.
_FLAGS = ("-std=c++17", "-fno-pie")
# No debug information: it would be most of each program, and faults name the
# kernel's lines alone.
_ENGINE_FLAGS = (*_FLAGS, "-O3")
# Binutils 2.40 confuses files 0 and 1 of DWARF 5.
_LINES = ("-g1", "-gdwarf-4")
_KERNEL_FLAGS = (
    *_FLAGS,
    "-O1",
    "-ffp-contract=fast",  # as NVRTC does
    "-fsanitize=thread",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-psabi",  # notes about ABI changes in GCC 4.6
    "-fno-stack-protector",  # some systems' default; an image has no libc
)
# Passes of g++'s -O1 that cost more time than they save: without them kernels
# compile in three quarters of the time and run as fast.
_LEFT_OUT = (
    "-fno-tree-ccp",
    "-fno-tree-dominator-opts",
    "-fno-tree-loop-optimize",
    "-fno-thread-jumps",
    "-fno-inline-functions-called-once",
    "-fno-forward-propagate",
    "-fno-if-conversion",
    "-fno-if-conversion2",
    "-fno-move-loop-invariants",
    "-fno-dce",
    "-fno-cprop-registers",
    "-fno-combine-stack-adjustments",
    "-fno-shrink-wrap",
    "-fno-compare-elim",
    "-fno-branch-count-reg",
    "-fno-reorder-blocks",
    "-fira-region=one",
)
_LINK_FLAGS = ("-no-pie",)
_FAULT = 70  # the engine's exit status for a fault
_LONGEST_TAIL = 2000  # characters of a child's stderr in messages


# ---- Compiling ----


def check_system() -> None:
    """Raise an UnsupportedError where the engine does not run.

    It is written for Linux's mmap, signal stacks, assembler and linker.
    """
    if not sys.platform.startswith("linux"):
        instead = {"win32": ": use WSL 2", "darwin": ": use a container"}
        raise UnsupportedError(
            f"the emulator runs only on Linux, this is {sys.platform}"
            + instead.get(sys.platform, "")
        )


def host_compiler() -> tuple[str, ...]:
    """The command that compiles C++ on this machine.

    Raises
    ------
    CompileError
        If there is no C++ compiler.
    """
    compiler = os.environ.get("CXX")
    for command in [compiler] if compiler else ["g++", "clang++"]:
        words = shlex.split(command)
        program = shutil.which(words[0]) if words else None
        if program:
            return (program, *words[1:])
    tried = (
        f"the environment variable CXX is {compiler!r}, which is not a program"
        if compiler
        else "neither g++ nor clang++ was found"
    )
    raise CompileError(
        "the emulator needs a C++ compiler, which was not found:"
        f" {tried}; install one (Debian and Ubuntu: apt install g++;"
        " Fedora: dnf install gcc-c++) or set CXX"
    )


def text(kernel: KernelPlan) -> str:
    """A kernel's source text for the C++ compiler."""
    return "\n".join([
        '#include "cuda_host.h"',
        source.build(kernel, twins=TWINS),
        f"EMULATOR_ENTRY({kernel.entry})\n",
    ])  # fmt: skip


def _headers() -> tuple[str, ...]:
    """The folder of the text's one header, as flags.

    Programs do not depend on where it lies, and are kept for any folder.
    """
    return f"-I{FOLDER}", f"-fmacro-prefix-map={FOLDER}/="


def _macros(arch: str) -> tuple[str, ...]:
    """The macros that the text needs."""
    return (f"-D__CUDA_ARCH__={10 * Device(arch).capability}",)


def explaining(arch: str) -> tuple[str, ...]:
    """The command that writes debug information of all types of a text."""
    command = host_compiler()
    return (
        *command,
        "-std=c++17",
        "-w",
        "-g",
        "-gdwarf-4",
        "-fno-eliminate-unused-debug-types",
        *_macros(arch),
        *_headers(),
        "-c",
    )


def executable(
    kernel: KernelPlan, arch: str, flags: tuple[str, ...] = ()
) -> tuple[Path, ...]:
    """The command that runs a kernel; its last word is the kernel's file.

    The file is compiled now if it does not exist.

    Parameters
    ----------
    kernel : plan.KernelPlan
    arch : str
        Such as ``sm_90a``; defines __CUDA_ARCH__.
    flags : tuple of str, optional
        Additional compiler and linker flags. With any, the kernel is linked
        with the engine to a program, and the build folder is kept next to it,
        with the suffix ``.build``: ``--coverage`` writes its files there.

    Raises
    ------
    CompileError
        If there is no compiler, or the kernel does not compile.
    """
    return _executable(kernel, arch, flags, not is_own(kernel))


def is_own(kernel: KernelPlan) -> bool:
    """Whether a kernel is cuflash's: those rarely have a fault to explain.

    Their programs have no lines, which a fourteenth of the compiler's time
    goes into.
    """
    return not Path(kernel.file).is_absolute()


def with_lines(kernel: KernelPlan, arch: str, flags: tuple[str, ...]) -> Path:
    """The same file with debug information, which changes no address."""
    return _executable(kernel, arch, flags, True)[-1]


def _executable(
    kernel: KernelPlan, arch: str, flags: tuple[str, ...], lines: bool
) -> tuple[Path, ...]:
    command = host_compiler()
    built = text(kernel)
    compiling = (
        *command,
        *(_LINES if lines else ()),
        *_KERNEL_FLAGS,
        *_own_flags(command),
        *_macros(arch),
        *flags,
    )
    headers = _headers()
    engine = _engine(command)
    loader = _loader(command, engine)
    layout = "" if flags else _layout(command, engine, loader)

    def link(made: Path, program: Path) -> subprocess.CompletedProcess[str]:
        if layout:
            script = made.with_suffix(".ld")
            script.write_text(layout, encoding="ascii")
            return _image(command, script, program, made)
        options = (*command, *_LINK_FLAGS, *flags)
        return _call(*options, made, engine, "-o", program)

    def build(path: Path) -> None:
        folder = path.with_suffix(".build")
        folder.mkdir(exist_ok=True)
        try:
            written, made = folder / "kernel.cpp", folder / "kernel.o"
            written.write_text(built, encoding="utf-8")
            done = _call(*compiling, *headers, "-c", written, "-o", made)
            if done.returncode == 0:
                done = link(made, folder / "program")
            if done.returncode:
                raise CompileError(
                    source.explain(
                        kernel, built, f"on the CPU with {command[0]}",
                        _log(done),
                        r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error:",
                    )
                )  # fmt: skip
            os.replace(folder / "program", path)
        finally:
            if not flags:
                shutil.rmtree(folder)

    # Of any checkout, as the engine's name tells the headers' content; but
    # what g++ notes of files (--coverage) is of this one.
    key = (_hash(built), compiling, flags and headers, engine.name, layout)
    made = _kept(f"{kernel.entry}_{_hash(key)}", build)
    return (loader, made) if layout else (made,)


def _engine(command: tuple[str, ...]) -> Path:
    """engine.cpp as an object file.

    Its name contains a hash of all files of the emulator.
    """
    compiling = (*command, *_ENGINE_FLAGS)

    def build(path: Path) -> None:
        made = path.with_suffix(".o")
        done = _call(*compiling, "-c", FOLDER / "engine.cpp", "-o", made)
        if done.returncode:
            raise CompileError(
                "the emulator's engine.cpp does not compile with"
                f" {command[0]}:\n{_log(done)}"
            )
        os.replace(made, path)

    files = sorted(x for x in os.listdir(FOLDER) if x.endswith((".h", ".cpp")))
    texts = (source.read(os.path.join(FOLDER, x)) for x in files)
    key = (compiling, _version(command), _hash_of_all(*texts))
    return _kept(f"engine_{_hash(key)}", build)


def _loader(command: tuple[str, ...], engine: Path) -> Path:
    """The engine as a program, which loads kernels' images."""

    def build(path: Path) -> None:
        # Starts in half of the time, where static libraries are installed.
        for how in (("-static",), ()):
            linking = (*command, *_LINK_FLAGS, *how, engine, "-o", path)
            done = _call(*linking)
            if done.returncode == 0:
                return
        raise CompileError(
            "the emulator's engine cannot be linked with"
            f" {command[0]}:\n{_log(done)}"
        )

    return _kept(f"{engine.name}_loader", build)


@functools.lru_cache(8)
def _layout(command: tuple[str, ...], engine: Path, loader: Path) -> str:
    """The linker's script of images, with the addresses of the engine.

    What compilers call in kernels has the prefix ``emulated_``. Empty without
    nm, or where the linker takes no such script: kernels are linked with the
    engine there.
    """
    nm = _named(command, "-print-prog-name=nm")
    try:
        said = [_call(nm, "-P", "--defined-only", x) for x in (engine, loader)]
        own, at = (dict(_SYMBOL.findall(x.stdout)) for x in said)
        written = _SCRIPT + "".join(
            f"{name.removeprefix('emulated_')} = 0x{at[name]};\n"
            for name in sorted(own.keys() & at.keys() - {"main"})
        )
        with tempfile.TemporaryDirectory() as folder:
            script, image = Path(folder, "image.ld"), Path(folder, "image")
            script.write_text(written, encoding="ascii")
            empty = "--defsym=emulator_entry=0"
            done = _image(command, script, image, empty)
    except OSError:
        return ""
    return "" if done.returncode else written


def _image(
    command: tuple[str, ...], script: Path, image: Path, *parts: str | Path
) -> subprocess.CompletedProcess[str]:
    """Link an image: without the compiler, which would add its libraries."""
    linker = _named(command, "-print-prog-name=ld")
    libgcc = _named(command, "-print-libgcc-file-name")  # its arithmetic
    return _call(linker, "-T", script, *parts, libgcc, "-o", image)


# Names and addresses of functions and variables that are not a file's own.
_SYMBOL = re.compile(r"^(\w+) [TBDR] ([0-9a-f]+)", re.M)
# Begins with the Image of engine_image.h. An image has no zeros that its file
# does not have.
_SCRIPT = """\
PHDRS { code PT_LOAD FLAGS(5); data PT_LOAD FLAGS(6); }
SECTIONS {
  . = emulator_image;
  .image : {
    QUAD(emulator_entry) QUAD(frames) QUAD(first) QUAD(last)
  } :code
  .text : { *(.text .text.*) } :code
  .rodata : { *(.rodata .rodata.* .gcc_except_table*) } :code
  .init_array : {
    first = .; KEEP(*(.init_array .init_array.*)) last = .;
  } :code
  .eh_frame : { frames = .; KEEP(*(.eh_frame)) LONG(0) } :code
  . = ALIGN(CONSTANT(MAXPAGESIZE));
  .data : { *(.data .data.* .bss .bss.* COMMON) QUAD(0) } :data
  /DISCARD/ : { *(.note.* .comment) }
}
"""


@functools.cache
def _named(command: tuple[str, ...], option: str) -> str:
    """What a compiler prints: a program or a file that it uses."""
    return _call(*command, option).stdout.strip()


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
        # NVRTC fuses multiply-adds; g++ at -O1 does so only with this flag.
        flags += ["-fexpensive-optimizations"]
        flags += _LEFT_OUT
        # Structs are copied whole, padding too. Stored by its fields, one that
        # is read whole would have bytes that nobody wrote.
        flags += ["--param=sra-max-scalarization-size-Ospeed=0"]
        # Variable tracking, which -g1 does not use, takes half as long again.
        flags += ["-fno-var-tracking"]
    # Unset variables are then not zero by chance. From GCC 12 on.
    unset = "-ftrivial-auto-var-init=pattern"
    if _call(*command, unset, "-x", "c++", "-E", os.devnull).returncode == 0:
        flags.append(unset)
    if platform.machine() == "x86_64":
        processors = Path("/proc/cpuinfo").read_text(encoding="utf-8")
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
    text = key if isinstance(key, str) else repr(key)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.lru_cache(4)
def _hash_of_all(*texts: str) -> str:
    return _hash("".join(texts))


def _kept(name: str, build: Callable[[Path], None]) -> Path:
    """The named file in the cache folder, built if it does not exist."""
    return cache.kept(f"cuflash_emulator/{name}", build)


def _log(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit status {done.returncode}"


# ---- Running ----


def run(
    command: tuple[Path, ...],
    folder: Path,
    entry: str,
    timeout: float,
    explain: Callable[[str], str] = str,
) -> None:
    """Run a launch and wait for its end.

    Parameters
    ----------
    command : tuple of Path
        As returned by `executable`.
    folder : Path
        Contains ``launch.txt`` and ``memory.bin``.
    entry : str
        The kernel's name, for messages.
    timeout : float
        In seconds.
    explain : callable, optional
        Applied to the engine's message of a fault.

    Raises
    ------
    KernelFault
        If the kernel performed an illegal operation or did not end in time.
    CompileError
        If the program cannot be started.
    """
    try:
        done = subprocess.run(
            [*command, folder],
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
            f" {folders.ADVICE} that programs can run from"
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
