"""The emulator's compiler, cache and child processes, and its `active`."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cuflash
from cuflash import emulator
from cuflash.backends.emulator import faults, memory, runtime
from cuflash.errors import CompileError, KernelFault, UnsupportedError
from cuflash.plans.plan import KernelPlan
from helpers.compare import assert_all, assert_elements
from helpers.host_compiler import needs_compiler

pytestmark = needs_compiler

TEXT = """\
#include "common/types.cuh"
struct Arguments { const float* x; float* out; int size; };
extern "C" __global__ void small(const __grid_constant__ Arguments a) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    %s
}
"""
DOUBLE = "if (i < a.size) a.out[i] = FACTOR * a.x[i];"


@pytest.fixture
def launch(tmp_path):
    """Emulate a kernel of 32 threads that has this body."""

    def run(body=DOUBLE, arch="sm_90a", **options):
        file = tmp_path / "small.cu"
        file.write_text(TEXT % body)
        kernel = KernelPlan(str(file), "small", (("FACTOR", 2),), 32, 0)
        x, out = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
        with emulator.active(arch, **options) as emulated:
            emulated.launch(kernel, 2, x=x, out=out, size=40)
        assert_elements(out, 2 * x, "out")
        return kernel

    return run


@pytest.fixture
def fast_engine(monkeypatch):
    """Compile engines fast."""
    monkeypatch.setattr(runtime, "_ENGINE_FLAGS", (*runtime._FLAGS, "-O0"))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuflash_emulator"


@pytest.fixture
def cache(tmp_path, request):
    """A cache folder with an engine, but no kernels."""
    command = runtime.host_compiler()
    engine = runtime._engine(command)  # in the usual cache
    loader = runtime._loader(command, engine)
    folder = request.getfixturevalue("empty_cache")
    folder.mkdir(parents=True)
    for path in (engine, loader):
        shutil.copy2(path, folder)
        shutil.copy2(path.with_suffix(".sha256"), folder)
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """Log the files that the C++ compiler compiles."""
    files = []
    call = runtime._call

    def note(*words):
        if "-c" in words:
            files.append(words[words.index("-c") + 1].name)
        return call(*words)

    monkeypatch.setattr(runtime, "_call", note)
    return files


# Compiling ---------------------------------------------------------------


def test_without_a_compiler(launch, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        launch()
    assert "neither g++ nor clang++ was found; install one" in str(
        caught.value
    )


def test_another_compiler_that_is_not_there(launch, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="CXX is 'no-such-compiler', which"):
        launch()


def test_a_compiler_that_fails_without_a_word(
    launch, empty_cache, monkeypatch, tmp_path
):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CompileError, match=r"with .*c\+\+.*\n.*status 3"):
        launch()
    assert {path.suffix for path in empty_cache.iterdir()} == {".lock"}


def test_a_fault_in_the_text_is_shown_with_its_lines(launch):
    with pytest.raises(CompileError) as caught:
        launch("a.out[i] = y;")
    message = str(caught.value)
    assert "small.cu does not compile on the CPU" in message
    assert "(FACTOR=2)" in message
    assert "small.cu:5:" in message and "'y'" in message
    assert "\n>    5 |     a.out[i] = y;\n     6 | }\n" in message


def test_a_kernel_is_compiled_once_and_then_kept(launch, cache, compiled):
    launch()
    assert compiled == ["kernel.cpp"]
    launch(seed=1)
    assert len(compiled) == 1
    launch("// another text\n" + DOUBLE)
    launch(arch="sm_80")
    assert compiled[1:] == ["kernel.cpp", "kernel.cpp"]


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_damaged_image_is_built_again(launch, cache, size):
    launch()
    (path,) = cache.glob("small_" + "?" * 40)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    launch("// another text\n" + DOUBLE)
    launch()
    assert path.read_bytes() == whole


def test_a_damaged_engine_is_built_again(fast_engine, launch, cache):
    launch()
    (path,) = cache.glob("engine_" + "?" * 40)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100])
    launch("// another text\n" + DOUBLE)
    assert path.stat().st_size == size


def test_the_engine_needs_no_static_libraries(launch, cache, monkeypatch):
    """Where they are missing, it is linked with shared ones."""
    (loader,) = cache.glob("engine_*_loader")
    loader.unlink()
    call, linked = runtime._call, []

    def without(*words):
        linked.extend(["-static" in words] * ("-no-pie" in words))
        return call(*("-no-such-flag" if x == "-static" else x for x in words))

    monkeypatch.setattr(runtime, "_call", without)
    launch()
    assert linked == [True, False]
    assert b"libstdc++.so" in loader.read_bytes()


def test_a_compiler_that_protects_stacks(
    fast_engine, launch, empty_cache, monkeypatch
):
    """By default, as on Ubuntu: an image has no libc to report to."""
    command = " ".join(runtime.host_compiler())
    monkeypatch.setenv("CXX", f"{command} -fstack-protector-all")
    launch()


def test_gnu_ld_makes_images(launch, cache):
    linker = runtime._named(runtime.host_compiler(), "-print-prog-name=ld")
    if "GNU ld" not in runtime._call(linker, "--version").stdout:
        pytest.skip("needs GNU ld")
    assert len(runtime.executable(launch(), "sm_90a")) == 2


@pytest.mark.parametrize("found", ["no-such-program", "false"])
def test_a_linker_that_makes_no_images(launch, cache, monkeypatch, found):
    """Or no nm: kernels are linked with the engine."""
    monkeypatch.setattr(runtime, "_named", lambda *_: found)
    kernel = launch()
    assert len(runtime.executable(kernel, "sm_90a")) == 1


def test_functions_that_nobody_defines(launch, cache):
    with pytest.raises(CompileError, match="undefined reference to .*absent"):
        launch("extern float absent(float); a.out[i] = absent(a.x[i]);")


@pytest.fixture
def copy(monkeypatch, tmp_path):
    """Take the emulator's files from a copy, as another checkout does."""

    def take():
        for path in runtime.FOLDER.glob("*.[hc]*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(runtime, "FOLDER", tmp_path)
        return tmp_path

    return take


def test_another_checkout_takes_the_same_programs(launch, cache, copy):
    kernel = launch()
    before = runtime.executable(kernel, "sm_90a")
    copy()
    assert runtime.executable(kernel, "sm_90a") == before


def test_a_changed_emulator_is_compiled_again(
    fast_engine, launch, cache, copy
):
    kernel = launch()
    before = runtime.executable(kernel, "sm_90a")
    with open(copy() / "engine.h", "a") as file:
        file.write("// changed\n")
    assert runtime.executable(kernel, "sm_90a") != before


def test_flags_keep_the_build_folder(launch, cache):
    launch(flags=("--coverage",))
    (folder,) = cache.glob("small_*.build")
    written = {path.name for path in folder.iterdir()}
    assert {"kernel.cpp", "kernel.gcno", "kernel.gcda"} <= written


# Running -----------------------------------------------------------------


def test_a_child_that_dies(launch):
    with pytest.raises(KernelFault, match="^small: died of SIGABRT$") as e:
        launch("__builtin_abort();")
    assert e.value.kernel == "small"
    assert e.value.message == "died of SIGABRT"


def test_a_child_that_hangs(launch):
    with pytest.raises(KernelFault, match=r"^small: did not end within 0.3 s"):
        launch("for (volatile int i = 0; i == 0;) {}", timeout=0.3)


def test_a_child_that_ends_otherwise(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no memory >&2\nexit 2\n")
    program.chmod(0o755)
    with pytest.raises(KernelFault, match="^f: ended with status 2: no mem"):
        runtime.run((program,), tmp_path, "f", 60)


def test_a_program_that_cannot_be_started(tmp_path):
    """As on a file system mounted with noexec."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o644)
    with pytest.raises(CompileError) as caught:
        runtime.run((program,), tmp_path, "f", 60)
    said = str(caught.value)
    assert "Permission denied" in said and str(program) in said
    assert said.endswith(
        "CUPY_CACHE_DIR to a writable folder that programs can run from"
    )


def test_a_fault_tells_the_line_and_whence_it_was_inlined(launch):
    last = "[](float* p) __attribute__((always_inline)) { *p = 1; }"
    with pytest.raises(KernelFault) as caught:
        launch(f"{last}\n(a.out + 40);")
    assert "thread" in caught.value.message
    assert "small.cu:5 (in small.cu:6): writes 4 bytes at byte 160 of out" in (
        caught.value.message
    )


def test_without_addr2line_a_fault_tells_the_address(launch, monkeypatch):
    monkeypatch.setenv("CXX", runtime.host_compiler()[0])
    monkeypatch.setattr(faults, "ADDR2LINE", "no-such-program")
    with pytest.raises(KernelFault, match=r"pc:0x[0-9a-f]+: writes 4 bytes"):
        launch("a.out[40] = 1;")


def test_nothing_is_left_of_a_launch(launch, monkeypatch, tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory, "_held_in_memory", lambda: folder)
    launch()
    with pytest.raises(KernelFault):
        launch("a.out[40] = 1;")
    assert not list(folder.iterdir())


# active ------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["hopper", "sm_70", "sm_91", "90", 90])
def test_an_architecture_that_no_kernel_has(arch):
    with pytest.raises(UnsupportedError) as caught:
        with emulator.active(arch):
            pass
    expected = f"arch is {arch!r}, expected one that kernels are planned for"
    assert str(caught.value).startswith(f"{expected}: sm_75, sm_80, ")
    assert emulator.current() is None


def test_a_precision_that_an_architecture_has_not():
    q = np.zeros((4, 8), np.float32)
    with emulator.active("sm_75"):
        with pytest.raises(UnsupportedError, match="'tf32x3' needs a GPU"):
            cuflash.forward(q, q, q, precision="tf32x3")


def test_another_system(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UnsupportedError, match="on Linux, this is darwin"):
        with emulator.active():
            pass


def test_active_nests_and_ends():
    assert emulator.current() is None
    with emulator.active("sm_80") as outer:
        with emulator.active("sm_90a", seed=3) as inner:
            assert emulator.current() is inner
            assert (inner.arch, inner.seed) == ("sm_90a", 3)
        assert emulator.current() is outer
    assert emulator.current() is None


def test_an_error_ends_it_too():
    with pytest.raises(KeyError), emulator.active():
        raise KeyError
    assert emulator.current() is None


def test_another_thread_is_not_concerned():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.getpid).result()  # the thread is there now
        with emulator.active():
            assert pool.submit(emulator.current).result() is None


def test_numpy_arrays_go_to_the_emulator(cache, compiled):
    q = np.ones((3, 8), np.float32)
    with emulator.active("sm_86"):
        out = cuflash.forward(q, q, q)
    assert compiled == ["kernel.cpp"]
    assert_all(out, 1, "out")
    cuflash.forward(q, q, q)
    assert len(compiled) == 1
