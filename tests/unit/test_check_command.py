"""`python -m cuflash check`: what it prints and how it ends."""

import contextlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash import __main__
from cuflash.build import warmup
from cuflash.check import behaviour, calls, command, machine, run, speed
from cuflash.check.calls import Call, Shape
from cuflash.check.places import Cpu
from cuflash.errors import UnsupportedError
from cuflash.plans.plan import device_of_arch

FEW = [
    Call("backward", "float32", Shape(1, 17, 33)),
    Call("readouts", "bfloat16", Shape(1, 17, 33), "peaked"),
]


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU and its driver; few calls."""

    def gpus():
        raise UnsupportedError("CuPy cannot be imported; install it")

    monkeypatch.setattr(warmup, "gpus", gpus)
    monkeypatch.setattr(warmup, "may_have_driver", lambda: False)
    monkeypatch.setattr(calls, "of_cpu", lambda quick: FEW[: 2 - quick])


def check(capsys, *words):
    """Return the exit status and what is printed."""
    status = __main__.main(["check", *words])
    return status, *capsys.readouterr()


def test_without_a_gpu_numpy_is_checked(no_gpu, capsys):
    status, said, beside = check(capsys)
    assert status == 0
    assert beside == ""  # no progress where nobody sees it
    assert said.startswith("cuflash ") and "\nNVRTC " in said
    words = " ".join(said.split())
    assert "NumPy is checked: CuPy cannot be imported; install it" in words
    assert "NumPy float32 1" in words and "NumPy bfloat16 1" in words
    assert "all 2 calls right" in said.splitlines()[-1]
    assert [x for x in said.splitlines() if len(x) > 79] == []


def test_quick_takes_fewer_calls(no_gpu, capsys):
    assert "all 1 calls right" in check(capsys, "--quick")[1]


def test_json_has_what_the_text_has(no_gpu, capsys):
    status, said, _ = check(capsys, "--json")
    found = json.loads(said)
    assert found["status"] == status == 0
    assert found["versions"]["numpy"] == np.__version__
    assert [x["family"] for x in found["lines"]] == ["NumPy", "NumPy"]
    assert found["gpu"] is None and found["faults"] == []


@pytest.mark.parametrize("words", [("--device", "1"), ()])
def test_a_gpu_that_cannot_be_used(no_gpu, capsys, monkeypatch, words):
    """It is asked for, or its driver is there."""
    monkeypatch.setattr(warmup, "may_have_driver", lambda: not words)
    status, said, _ = check(capsys, *words)
    assert status == 2
    assert "the GPU cannot be used: CuPy cannot be" in " ".join(said.split())
    assert said.splitlines()[-1].startswith("NOT CHECKED")


def test_a_wrong_result_is_told(no_gpu, capsys, monkeypatch):
    """By the call and the element, with both numbers."""

    def wrong(call, place):
        results = known(call, place)
        return {x: 2 * y if x == "dk" else y for x, y in results.items()}

    known = run.run
    monkeypatch.setattr(run, "run", wrong)
    status, said, _ = check(capsys)
    assert status == 1
    assert "1 of 2 calls WRONG" in said
    assert "backward float32 1x17x33 heads 2/1 d 64/64 coded: dk[" in said


def test_a_cache_that_cannot_be_written_is_noted(
    no_gpu, capsys, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    status, said, _ = check(capsys, "--quick")
    assert status == 0
    assert "compiled kernels cannot be kept in" in " ".join(said.split())


def test_a_disk_without_room_is_noted(no_gpu, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    usage = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage)
    words = " ".join(check(capsys, "--quick")[1].split())
    assert "only 5 MiB are free in" in words and "CUPY_CACHE_DIR" in words


# Which GPU -------------------------------------------------------------------


class OfCapability:
    """GPU 0 is too old."""

    def __init__(self, index):
        self.index = index

    def device(self):
        if self.index == 0:
            raise UnsupportedError("CUDA device 0 has compute capability 7.0")


@pytest.mark.parametrize(
    ("names", "device", "order"),
    [("ab", None, [1]), ("abc", 2, [2, 1]), ("ab", 1, [1])],
)
def test_a_gpu_that_is_too_old_is_left_out(monkeypatch, names, device, order):
    monkeypatch.setattr(command, "Gpu", OfCapability)
    found = command._in_order(device, [*names])
    assert [x.index for x in found] == order


@pytest.mark.parametrize(
    ("device", "said"),
    [(None, "7.0; GPUs here: 0 .Tesla V100."), (0, "7.0; GPUs here"),
     (3, "--device is 3, expected one of 0 .Tesla V100.")],
)  # fmt: skip
def test_no_gpu_that_is_supported(monkeypatch, device, said):
    monkeypatch.setattr(command, "Gpu", OfCapability)
    with pytest.raises(UnsupportedError, match=said):
        command._in_order(device, ["Tesla V100"])


# A GPU -----------------------------------------------------------------------


class FakeGpu(Cpu):
    """Runs NumPy's calls, and says that it is an A100."""

    index, cupy = 0, None
    lost = False

    def device(self):
        return device_of_arch("sm_80")

    def is_lost(self, error):
        return self.lost

    def replayed(self, call, other):
        return run.run(other, self)

    def on_two_streams(self, two):
        return [run.run(x, self) for x in two]

    def seconds(self, work, at_least):
        work()
        return 1e-3

    def clock(self):
        return 1.41e9


@pytest.fixture
def gpu(monkeypatch):
    """Two fake GPUs, with few calls and short ones to time."""
    monkeypatch.setattr(command, "Gpu", FakeGpu)
    two = [FakeGpu(), FakeGpu()]
    monkeypatch.setattr(command, "_gpus", lambda device, found: two)
    facts = dict(name="NVIDIA A100-SXM4-80GB", capability="8.0", num_sms=108,
                 memory_gib=79.3, driver="580.1", driver_cuda="13.0",
                 runtime_cuda="13.0")  # fmt: skip
    monkeypatch.setattr(machine, "of_gpu", lambda cupy, index: facts)
    some = [
        Call("backward", "float32", Shape(1, 17, 33), family="fma",
             deterministic=True),
        Call("forward", "float32", Shape(1, 1, 65), family="decode_simt",
             num_splits=3),
        Call("forward", "float16", Shape(1, 17, 33), family="sm90"),
    ]  # fmt: skip
    monkeypatch.setattr(calls, "of_families", lambda quick: some)
    monkeypatch.setattr(command.kernels, "compile_all", lambda *of: [None])
    for name in ("FAST", "PLAIN", "DECODE"):
        monkeypatch.setattr(speed, name, Shape(1, 8, 8, 2, 2, 64, 64))
    return two[0]


def test_a_gpu_is_checked(gpu, capsys):
    status, said, _ = check(capsys)
    lines = said.splitlines()
    assert status == 0, said
    assert [x for x in lines if len(x) > 79] == []
    words = [x.split() for x in lines]
    assert ["fma", "float32", "1"] in [x[:3] for x in words]
    assert any("below" in x for x in lines if "forward" in x)  # a limit
    assert "not on this GPU: sm90 float16" in said
    for name in ("same bits twice", "CUDA graph", "two streams", "second GPU"):
        assert any(x.startswith(name) and x.endswith("right") for x in lines)
    assert lines[-2].startswith("time: planning ")
    assert lines[-1] == "all 9 calls right"


def test_a_kernel_that_does_not_compile_is_told(gpu, capsys, monkeypatch):
    error = command.CuflashError("fma/forward.cu does not compile")
    monkeypatch.setattr(command.kernels, "compile_all", lambda *of: [error])
    status, said, _ = check(capsys)
    assert status == 1 and "fma/forward.cu does not compile" in said
    assert said.splitlines()[-1].endswith("calls right, 1 FAULTS besides")


def test_any_exception_is_in_the_report(no_gpu, capsys, monkeypatch):
    monkeypatch.setattr(run, "run", lambda call, place: 1 / 0)
    status, said, _ = check(capsys)
    assert status == 1 and "ZeroDivisionError" in said
    assert said.splitlines()[-1] == "2 of 2 calls WRONG"


def test_an_error_before_the_calls_is_no_wrong_result(
    no_gpu, capsys, monkeypatch
):
    def fail(quick):
        raise UnsupportedError("CUFLASH_FAMILY is no family")

    monkeypatch.setattr(calls, "of_cpu", fail)
    status, _, said = check(capsys)
    assert status == 2 and "cuflash: CUFLASH_FAMILY is no family" in said


def test_a_lost_context_ends_the_check(gpu, capsys, monkeypatch):
    def fail(call, place):
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(run, "run", fail)
    monkeypatch.setattr(FakeGpu, "lost", True)
    status, said, _ = check(capsys)
    assert status == 1
    words = " ".join(said.split())
    assert "deterministic ended the GPU's context: cudaErrorIllegal" in words
    assert "1 of 1 calls WRONG" in said


def test_a_call_that_raises_is_wrong_and_the_others_go_on(
    gpu, capsys, monkeypatch
):
    def fail(call, place):
        if call.family == "fma":
            raise RuntimeError("out of memory")
        return known(call, place)

    known = run.run
    monkeypatch.setattr(run, "run", fail)
    status, said, _ = check(capsys)
    assert status == 1
    assert "RuntimeError: out of memory" in said
    assert "decode_simt" in said


def test_bits_that_differ_are_told():
    one, other = np.zeros(4, np.float32), np.float32([0, 0, -0.0, 0])
    said = behaviour._differs({"dq": one}, {"dq": other})
    assert said == "dq differs in 6.25% of its bytes"


def test_progress_is_one_line_of_a_terminal(monkeypatch):
    text = []
    terminal = SimpleNamespace(
        isatty=lambda: True, write=text.append, flush=lambda: None
    )
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = command.Progress()
    with contextlib.suppress(AttributeError):
        progress.say("call 1 of 2")
        progress.clear()
    written = "".join(text)
    assert written.startswith("\rcall 1 of 2") and written.endswith("\r")
    assert "\n" not in written


def test_speeds_of_a_tile_table_are_expected_on_its_gpu():
    call = Call("backward", "float64", speed.PLAIN, family="mma8_float64")
    device = device_of_arch("sm_90a")
    known, where = speed.measured(call, "backward", speed.PLAIN, device)
    assert known > 10 and where == "NVIDIA H200"
