"""`cuflash.check.gpu.Gpu` with a CuPy of NumPy arrays.

It has what CuPy's has, and no more; its graphs repeat nothing.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cuflash.check import gpu as gpus
from cuflash.check import speed
from cuflash.check.calls import Call, Shape
from cuflash.check.run import run
from cuflash.plans.plan import device_of_arch

CALL = Call(
    "backward", "float32", Shape(1, 17, 33), family="fma", deterministic=True
)


class Array(np.ndarray):
    """An array with CuPy's memory pointer."""

    @property
    def data(self):
        return SimpleNamespace(
            copy_from_device_async=lambda source, nbytes, stream: None,
            memset_async=lambda value, nbytes, stream: None,
        )


class Stream:
    def __init__(self, non_blocking=False):
        assert non_blocking
        self.log = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        self.log.append("synchronize")

    def begin_capture(self):
        self.log.append("begin")

    def end_capture(self):
        assert self.log[-1] == "begin"
        return SimpleNamespace(launch=lambda stream: None)


class Device:
    """A context, and the device's attributes."""

    attributes = {"ClockRate": 1_410_000}  # kHz

    def __init__(self, index=0):
        pass

    __enter__, __exit__ = Stream.__enter__, Stream.__exit__

    def synchronize(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """A Gpu whose calls NumPy computes."""
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    runtime = SimpleNamespace(
        deviceSynchronize=Mock(), getDeviceProperties=lambda index: {}
    )
    cupy = SimpleNamespace(
        asarray=lambda x: np.array(x).view(Array), asnumpy=np.asarray,
        full=np.full, zeros=lambda n: Mock(),
        cuda=SimpleNamespace(
            Device=Device, Stream=Stream, runtime=runtime,
            Event=Mock, get_elapsed_time=lambda a, b: 2.0,
        ),
    )  # fmt: skip
    device = replace(device_of_arch("sm_80"), bandwidth=1555)
    backend = SimpleNamespace(
        cupy=cupy,
        device=lambda index: device,
        forget_backends=Mock(),
        backend=lambda index: SimpleNamespace(
            family=os.environ.get(gpus.VARIABLE)
        ),
    )
    monkeypatch.setattr(gpus, "on_cuda", lambda: backend)

    def launch(*of):
        return {x: y.view(Array) for x, y in launched(*of).items()}

    launched = gpus.run.launch
    monkeypatch.setattr(gpus.run, "launch", launch)
    yield gpus.Gpu(0)
    os.environ.pop(gpus.VARIABLE, None)


def test_a_family_is_asked_for_by_the_environment(gpu):
    """A backend reads it once, so that others forget theirs."""
    for family, times in (("fma", 1), ("fma", 1), ("simt", 2), (None, 3)):
        with gpu.by(replace(CALL, family=family)):
            assert os.environ.get("CUFLASH_FAMILY") == family
        assert gpu.backend.forget_backends.call_count == times


def test_calls_go_to_the_device_and_back(gpu):
    got = run(CALL, gpu)
    assert {*got} == {"out", "lse", "dq", "dk", "dv"}
    assert got["dk"].shape == (1, 33, 1, 64)


def test_graphs_and_streams_run(gpu):
    other = gpus.other_values(CALL)
    assert other.values != CALL.values
    assert {*gpu.replayed(CALL, other)} == {"out", "lse", "dq", "dk", "dv"}
    first, second = gpu.on_two_streams((CALL, other))
    assert first.keys() == second.keys()
    assert not np.array_equal(first["out"], second["out"])


def test_a_context_is_lost_if_nothing_runs(gpu):
    assert not gpu.is_lost(RuntimeError())
    gpu.cupy.cuda.runtime.deviceSynchronize.side_effect = RuntimeError
    assert gpu.is_lost(RuntimeError())


def test_times_are_those_of_a_call(gpu, monkeypatch):
    monkeypatch.setattr(speed, "PLAIN", Shape(1, 8, 8, 2, 2, 64, 64))
    monkeypatch.setattr(speed, "DECODE", Shape(1, 1, 8, 2, 2, 64, 64))
    forward, backward = speed.speeds(CALL, gpu)
    # 2 ms for as many calls as take 150 ms by the first: 75.
    assert forward.seconds == pytest.approx(2e-3 / 75)
    assert backward.rate == pytest.approx(2.5 * forward.rate)
    # 108 SMs of 64 multiply-adds at 1.41 GHz.
    assert forward.limit == pytest.approx(19.49, abs=0.01)
    call = replace(CALL, direction="forward", family="decode_simt")
    (decoding,) = speed.speeds(call, gpu)
    assert (decoding.unit, decoding.limit) == ("GB/s", 1555)
