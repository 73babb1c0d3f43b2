"""``python -m cuflash``: what it prints and how it ends."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import cuflash
from cuflash import __main__, folders
from cuflash.backends.emulator import runtime
from cuflash.build import nvrtc, warmup
from cuflash.errors import CompileError, UnsupportedError
from cuflash.plans.plan import device_of_arch
from helpers.kernels import kernels, small_kernel
from helpers.this_gpu import GPU


@pytest.fixture
def default_kernels(monkeypatch):
    """Replace the default kernels by ones that compile faster."""

    def use(*kernels):
        monkeypatch.setattr(__main__, "_kernels", lambda device: kernels)

    return use


def report_of(kernel, **numbers):
    of_all = dict(registers=99, shared_bytes=kernel.shared_bytes,
                  spill_bytes=0, seconds=1.25, warnings=())  # fmt: skip
    return nvrtc.Report(**{**of_all, **numbers})


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_every_default_plan_compiles_without_spills(arch, capsys):
    status = __main__.main(["compile", "--arch", arch])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert " 0 failed" in printed and "forward_" in printed


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_no_two_default_kernels_print_alike(arch):
    found = __main__._kernels(device_of_arch(arch))
    assert len({__main__._describe(k) for k in found}) == len(found)


def test_compile_prints_a_line_a_kernel(default_kernels, monkeypatch, capsys):
    kernel = small_kernel()
    default_kernels(kernel)
    monkeypatch.setattr(nvrtc, "report", lambda k, arch: report_of(k))
    assert __main__.main(["compile", "--arch", "sm_80, sm_86"]) == 0
    head, *lines, total = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "arch", "kernel", "registers", "shared", "spill", "seconds"
    ]  # fmt: skip
    assert sorted(line.split()[0] for line in lines) == ["sm_80", "sm_86"]
    numbers = ["99", str(kernel.shared_bytes), "0", "1.2"]
    assert all(line.split()[-4:] == numbers for line in lines)
    assert total.startswith("2 kernels in ")


def test_a_tensor_core_kernel_that_spills_fails(
    default_kernels, monkeypatch, capsys
):
    default_kernels(replace(small_kernel(), file="sm90/forward.cu"))
    monkeypatch.setattr(
        nvrtc, "report", lambda k, arch: report_of(k, spill_bytes=8)
    )
    assert __main__.main(["compile", "--arch", "sm_80"]) == 1
    assert "spills 8 bytes per thread" in capsys.readouterr().out


def test_products_that_wait_for_one_another_fail(
    default_kernels, monkeypatch, capsys
):
    (kernel,) = kernels("forward", "float16", "sm_90a")
    assert kernel.file == "sm90/forward.cu"
    default_kernels(kernel)
    said = ("(C7514) wgmma.mma_async instructions are serialized",)
    monkeypatch.setattr(
        nvrtc, "report", lambda k, arch: report_of(k, warnings=said)
    )
    assert __main__.main(["compile", "--arch", "sm_90a"]) == 1
    assert "ptxas serialized its wgmma instr" in capsys.readouterr().out


def test_a_plain_kernel_may_spill(default_kernels, monkeypatch):
    default_kernels(small_kernel())
    monkeypatch.setattr(
        nvrtc, "report", lambda k, arch: report_of(k, spill_bytes=8)
    )
    assert __main__.main(["compile", "--arch", "sm_80"]) == 0


def test_wrong_shared_memory_fails_and_the_others_go_on(
    default_kernels, capsys
):
    wrong = small_kernel(SHARED_BYTES=123)
    default_kernels(wrong, small_kernel())
    assert __main__.main(["compile", "--arch", "sm_80", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "2 kernels in" in printed
    assert "the plan and the kernel disagree" in printed


def test_shared_memory_that_the_plan_does_not_know_fails(
    default_kernels, monkeypatch, capsys
):
    default_kernels(small_kernel())
    monkeypatch.setattr(
        nvrtc, "report", lambda k, arch: report_of(k, shared_bytes=7)
    )
    assert __main__.main(["compile", "--arch", "sm_80"]) == 1
    assert "needs 7 bytes of shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_90,sm_90a"])
def test_hopper_is_compiled_for_once_and_with_wgmma(
    arch, default_kernels, monkeypatch, capsys
):
    archs = []
    default_kernels(small_kernel())
    monkeypatch.setattr(
        nvrtc, "report", lambda k, arch: archs.append(arch) or report_of(k)
    )
    assert __main__.main(["compile", "--arch", arch]) == 0
    assert archs == ["sm_90a"]


@pytest.mark.parametrize(
    "arch",
    ["90a", "sm_", "", "sm_80;sm_90a", "sm_70", "sm_999", "sm_9", "sm_80a",
     "sm_90f", "sm_90aa"],
)  # fmt: skip
def test_an_architecture_without_default_plans_is_an_error(arch, capsys):
    assert __main__.main(["compile", "--arch", arch]) == 1
    assert f"--arch got '{arch}', expected " in capsys.readouterr().err


def test_no_nvrtc_is_said_once(monkeypatch, capsys):
    def none():
        raise CompileError("NVRTC was not found; install cuflash[cuda13]")

    monkeypatch.setattr(nvrtc, "_nvrtc", none)
    assert __main__.main(["compile"]) == 1
    assert capsys.readouterr().err.count("NVRTC was not found") == 1


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_waits_for_no_kernel():
    # A shell's background jobs ignore the signal, and so do their children.
    text = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from cuflash import __main__
from cuflash.backends.emulator import runtime
from cuflash.build import nvrtc, warmup
def report(kernel, arch):
    print("compiling", flush=True)
    time.sleep(600)
nvrtc.report = report
__main__._end(__main__.main(["compile", "--arch", "sm_80", "--jobs", "2"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Of two threads that print at once, the words may share a line.
    assert any("compiling" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "cuflash: stopped\n")


def test_info_lists_what_the_emulator_lacks(capsys, monkeypatch):
    monkeypatch.setattr(runtime, "check_system", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert __main__.main(["info"]) == 0
    assert "CXX is 'no-such-compiler', which is not a pro" in (
        capsys.readouterr().out
    )


def test_info_names_an_unknown_setting(capsys, monkeypatch):
    monkeypatch.setenv("CUFLASH_LOG", "plans")
    assert __main__.main(["info"]) == 0
    line = "plans (unknown: expected 'plan' or unset)"
    assert line in capsys.readouterr().out


def test_info_without_a_cache_folder(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    assert __main__.main(["info"]) == 0
    said = capsys.readouterr().out
    assert f"compiled kernels cannot be kept in {tmp_path / 'file'}" in said
    assert "CUFLASH_LOG" in said


def test_a_reader_that_leaves_early_is_no_fault():
    """As in `python -m cuflash info | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "cuflash", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cuflash {cuflash.__version__}\n"


def test_info_lists_packages_and_settings(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUFLASH_LOG", "plan")
    assert __main__.main(["info"]) == 0
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert lines["NVRTC"] == nvrtc.version()
    assert lines["CUFLASH_LOG"] == "plan"
    assert str(tmp_path) in lines["cache"]
    assert "GPU" in lines


@pytest.mark.skipif(bool(GPU), reason="says what is said without a GPU")
def test_warmup_without_a_gpu(capsys):
    assert __main__.main(["warmup"]) == 1
    assert capsys.readouterr().err.startswith("cuflash: ")


def gpus_of_capability(monkeypatch, *capabilities):
    """Pretend to have these GPUs; those below 7.5 are too old."""

    def device(index):
        if capabilities[index] < 75:
            raise UnsupportedError(f"CUDA device {index} is too old")
        return device_of_arch(f"sm_{capabilities[index]}")

    fake = SimpleNamespace(device=device)
    names = [f"GPU of {c}" for c in capabilities]
    monkeypatch.setattr(warmup, "gpus", lambda: names)
    monkeypatch.setitem(sys.modules, "cuflash.backends.cupy", fake)
    monkeypatch.setattr(cuflash.backends, "cupy", fake, raising=False)


def cubins_in(monkeypatch, folder):
    """Pretend to compile; return the list of architectures."""
    archs = []

    def compile_for(kernel, arch):
        archs.append(arch)
        return folder / f"{arch}.cubin"

    monkeypatch.setattr(nvrtc, "cubin_file", compile_for)
    return archs


def test_warmup_on_a_full_disk_fails(
    default_kernels, monkeypatch, capsys, tmp_path
):
    gpus_of_capability(monkeypatch, 80)
    default_kernels(small_kernel())
    cubins_in(monkeypatch, tmp_path / "elsewhere")
    monkeypatch.setattr(warmup, "remember_default_compiles", None)
    assert __main__.main(["warmup"]) == 1
    said = capsys.readouterr().out
    assert "could not be kept" in said and "1 failed" in said


def test_warmup_leaves_out_a_gpu_that_is_too_old(
    default_kernels, monkeypatch, capsys
):
    gpus_of_capability(monkeypatch, 70, 80)
    default_kernels(small_kernel())
    compiled = cubins_in(monkeypatch, folders.cache_folder())
    monkeypatch.setattr(warmup, "remember_default_compiles", lambda: None)
    assert __main__.main(["warmup"]) == 0
    assert compiled == ["sm_80"]
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "skipped: GPU 0 (GPU of 70): CUDA device 0 is too old"


def test_warmup_that_could_keep_nothing_compiles_nothing(
    default_kernels, monkeypatch, capsys, tmp_path
):
    gpus_of_capability(monkeypatch, 80)
    monkeypatch.setattr(nvrtc, "cubin_file", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    assert __main__.main(["warmup"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("cuflash: compiled kernels cannot be kept in ")
    assert "CUPY_CACHE_DIR" in said


def test_warmup_with_old_gpus_alone_fails(monkeypatch, capsys):
    gpus_of_capability(monkeypatch, 70, 61)
    assert __main__.main(["warmup"]) == 1
    said = capsys.readouterr().err
    assert "device 0 is too old" in said and "device 1 is too old" in said


@pytest.mark.gpu
def test_warmup_fills_the_cache_and_is_remembered(
    default_kernels, monkeypatch, tmp_path
):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    default_kernels(small_kernel())
    assert __main__.main(["warmup"]) == 0
    assert len(list(tmp_path.glob("cuflash_*.cubin"))) == 1
    assert len(list(tmp_path.glob("cuflash_*.compiled"))) == 1
