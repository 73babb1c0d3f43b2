"""NVRTC without a GPU: options, reports, errors, the cache and its locks."""

import functools
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cuflash import folders
from cuflash.build import nvrtc
from cuflash.errors import CompileError
from cuflash.expressions import trace
from cuflash.request.problem import MOST_STATES, Rotary
from helpers.dtypes import DTYPES, lse_dtype
from helpers.kernels import kernels, small_kernel

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120")


# A kernel has the same cubin in each test of the cache.
_compiled_once = functools.cache(nvrtc._compile)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Log the names of kernels compiled from now on, with an empty cache."""
    names = []

    def compile_and_note(kernel, arch):
        names.append((kernel.entry, arch))
        return _compiled_once(kernel, arch)

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_compile", compile_and_note)
    return names


def test_the_architecture_is_among_the_options():
    assert "-arch=sm_90a" in nvrtc.options(small_kernel(), "sm_90a")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_max_score_on_hopper_does_not_spill(head_dim, causal):
    for options in ({}, {"window": (100, 100)}, {"sink": True}):
        *_, kernel = kernels(
            "forward", "bfloat16", "sm_90a", head_dim, "sm90", causal=causal,
            return_max_score=True, **options,
        )  # fmt: skip
        report = nvrtc.report(kernel, "sm_90a")
        assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_plain_kernel_compiles(arch, dtype, head_dim):
    of_both = [
        kernel
        for direction in ("forward", "backward")
        for kernel in kernels(direction, dtype, arch, head_dim, "simt")
    ]
    assert len(of_both) == 4
    for kernel in of_both:
        report = nvrtc.report(kernel, arch)
        assert report.shared_bytes == kernel.shared_bytes
        assert not report.warnings


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("float32", 64), ("float32", 128), ("float32", 256), ("float64", 64),
     ("float64", 128)],
)  # fmt: skip
def test_kernels_of_wide_types_do_not_spill(direction, arch, dtype, head_dim):
    for kernel in kernels(direction, dtype, arch, head_dim):
        report = nvrtc.report(kernel, arch)
        assert report.shared_bytes == kernel.shared_bytes
        assert report.spill_bytes == 0 and not report.warnings


# Bytes of a tile of 128 x 32 that is 5 to 13 % faster, as measured, than the
# largest one without spills, 64 x 64.
SPILLED = {("jvp", "tf32x3", 64): 160}


@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float64", None), ("float32", "tf32x3")]
)
def test_mma8_derivatives_do_not_spill(direction, head_dim, dtype, precision):
    options = {"precision": precision, "causal": False}
    for kernel in kernels(direction, dtype, "sm_90a", head_dim, **options):
        report = nvrtc.report(kernel, "sm_90a")
        assert report.shared_bytes == kernel.shared_bytes
        limit = SPILLED.get((direction, precision, head_dim), 0)
        assert report.spill_bytes <= limit and not report.warnings


@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float16", "sm_90a"), ("bfloat16", "sm_80"), ("float32", "sm_75"),
     ("float64", "sm_120")],
)  # fmt: skip
def test_kernels_of_derivatives_compile(direction, dtype, arch):
    for kernel in kernels(direction, dtype, arch, 128):
        report = nvrtc.report(kernel, arch)
        assert report.shared_bytes == kernel.shared_bytes
        assert not report.warnings


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("direction", ["jvp", "double_backward"])
def test_derivatives_of_float32_do_not_spill(arch, head_dim, direction):
    for kernel in kernels(direction, "float32", arch, head_dim):
        report = nvrtc.report(kernel, arch)
        assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("head_dim", [64, 128])
def test_double_backward_on_hopper_does_not_spill(head_dim):
    """But for the kernels of flagged tiles."""
    for kernel in kernels("double_backward", "bfloat16", "sm_90a", head_dim):
        if not kernel.file.startswith("simt/"):
            report = nvrtc.report(kernel, "sm_90a")
            assert report.spill_bytes == 0 and not report.warnings


def capped(score, b, h, q_idx, kv_idx):
    return 20.0 * np.tanh(0.05 * score)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_double_backward_of_scores_spills_little(head_dim):
    """Its f_x and f_xx take 64 registers more: docs/lab/derivatives.md."""
    score, _ = trace.record(capped, "score_mod", trace.Given())
    *_, main, _, _, _ = kernels(
        "double_backward", "bfloat16", "sm_90a", head_dim, score_mod=score
    )
    assert main.file == "sm90/double_backward.cu"
    assert nvrtc.report(main, "sm_90a").spill_bytes <= 48


NO_ROOM = [("jvp", "sm_86", 512), ("double_backward", "sm_86", 512)]


@pytest.mark.parametrize(
    "direction", ["forward", "backward", "jvp", "double_backward"]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("head_dim", [320, 384, 512])
def test_wide_heads_on_tensor_cores_do_not_spill(direction, arch, head_dim):
    """With options, which take registers; on Hopper by sm80 too."""
    if (direction, arch, head_dim) in NO_ROOM:
        return
    options = {"softcap": 1.0, "bias": "float16", "dropout": 0.5}
    for asked in ({}, options):
        *_, kernel = (
            x
            for x in kernels(
                direction, "float16", arch, head_dim, "sm80", **asked
            )
            if x.file.startswith("sm80/")
        )
        report = nvrtc.report(kernel, arch)
        assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [2, MOST_STATES])
def test_merge_compiles(dtype, num_states):
    (kernel,) = kernels("merge", dtype, "sm_80", num_states=num_states)
    report = nvrtc.report(kernel, "sm_80")
    assert kernel.file == "merge.cu"
    assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", ["int32", "int64", None])
def test_rotary_compiles(dtype, positions):
    tables = dtype if positions == "int32" else lse_dtype(DTYPES[dtype]).name
    rotary = Rotary(64, 128, tables, positions, False, False)
    (kernel,) = kernels("rotary", dtype, "sm_80", rotary=rotary)
    report = nvrtc.report(kernel, "sm_80")
    assert kernel.file == "prepare/rotary.cu"
    assert report.spill_bytes == 0 and not report.warnings


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_padded_tensor_core_kernel_compiles(direction):
    """Unlike any default plan: padded, deterministic, scale below 0."""
    options = {"scale": -1.0, "deterministic": direction == "backward"}
    for kernel in kernels(direction, "float16", "sm_80", 40, **options):
        report = nvrtc.report(kernel, "sm_80")
        assert report.shared_bytes == kernel.shared_bytes
        assert report.spill_bytes == 0 and not report.warnings


def test_a_report_has_all_its_numbers():
    report = nvrtc.report(small_kernel(), "sm_80")
    assert 16 <= report.registers <= 255
    assert report.spill_bytes == 0
    assert report.seconds > 0


def test_a_second_report_has_them_too():
    """NVRTC's own cache, if a driver provides one, has no reports."""
    first, again = (nvrtc.report(small_kernel(), "sm_80") for _ in "12")
    assert first.registers > 0
    assert again.registers == first.registers


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("12.8", ()),
        ("12.9", ("--no-cache",)),
        ("12.10", ("--no-cache",)),
        ("13.0", ("--no-cache",)),
    ],
)
def test_a_report_asks_nvrtc_not_to_use_its_cache(monkeypatch, version, flags):
    def note(kernel, arch, *more):
        asked.append(more)
        return b"", ""

    asked = []
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    monkeypatch.setattr(nvrtc, "_compile", note)
    nvrtc.report(small_kernel(), "sm_80")
    assert asked == [("--ptxas-options=-v", *flags)]


def test_a_wrong_shared_memory_plan_does_not_compile():
    wrong = small_kernel(SHARED_BYTES=123)
    with pytest.raises(CompileError, match="does not compile for sm_80") as e:
        nvrtc.report(wrong, "sm_80")
    message = str(e.value)
    assert "SHARED_BYTES=123" in message
    assert "the plan and the kernel disagree" in message
    fault = re.search(r"simt/forward\.cu\((\d+)\): error", message)
    marked = rf"(?m)^> +{fault[1]} \| static_assert\(sizeof\(SharedPlan\)"
    assert re.search(marked, message)


def test_a_fault_in_the_constants_is_shown_there():
    wrong = small_kernel(Element="half_a_float")
    with pytest.raises(CompileError, match=r"constants.cuh\(1\): error") as e:
        nvrtc.report(wrong, "sm_80")
    assert "\n>    1 | using Element = half_a_float;\n" in str(e.value)


def test_a_kernel_is_compiled_once_and_then_read(compiled):
    first = nvrtc.cubin_file(small_kernel(), "sm_80")
    assert nvrtc.cubin_file(small_kernel(), "sm_80") == first
    assert first.read_bytes().startswith(b"\x7fELF")
    assert compiled == [("forward_simt", "sm_80")]


def test_another_constant_or_architecture_is_another_file(compiled):
    asked = [
        (small_kernel(), "sm_80"),
        (small_kernel(CAUSAL=False), "sm_80"),
        (small_kernel(), "sm_90a"),
    ]
    assert len({nvrtc.cubin_file(*one) for one in asked}) == 3


def test_another_release_of_nvrtc_is_another_file(compiled, monkeypatch):
    """So an upgrade does not run what the release before it compiled."""
    first = nvrtc.cubin_file(small_kernel(), "sm_80")
    monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    assert nvrtc.cubin_file(small_kernel(), "sm_80") != first
    assert len(compiled) == 2


def test_threads_that_need_one_kernel_compile_it_once(compiled):
    _compiled_once.cache_clear()  # else it takes no time
    with ThreadPoolExecutor(4) as pool:
        files = pool.map(
            lambda _: nvrtc.cubin_file(small_kernel(), "sm_80"), range(4)
        )
        assert len(set(files)) == 1
    assert len(compiled) == 1


def test_a_call_waits_for_no_other_kernel(compiled, monkeypatch):
    under_way, may_end = threading.Event(), threading.Event()
    compile_at_once = nvrtc._compile

    def compile_slowly(kernel, arch):
        if arch == "sm_120":
            under_way.set()
            may_end.wait()
        return compile_at_once(kernel, arch)

    monkeypatch.setattr(nvrtc, "_compile", compile_slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(nvrtc.cubin_file, small_kernel(), "sm_120")
        assert under_way.wait(60)
        assert nvrtc.cubin_file(small_kernel(), "sm_80").exists()
        assert not slow.done()
        may_end.set()
    assert slow.result().exists()


def test_a_failed_compilation_leaves_nothing_behind(compiled):
    wrong = small_kernel(SHARED_BYTES=1)
    for _ in range(2):
        with pytest.raises(CompileError):
            nvrtc.cubin_file(wrong, "sm_80")
    assert len(compiled) == 2
    assert not list(folders.cache_folder().glob("*.cubin"))


@pytest.mark.parametrize("size", [0, 100])
def test_a_damaged_cubin_is_compiled_again(compiled, size):
    path = nvrtc.cubin_file(small_kernel(), "sm_80")
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    assert nvrtc.cubin_file(small_kernel(), "sm_80") == path
    assert path.read_bytes() == whole
    assert len(compiled) == 2
