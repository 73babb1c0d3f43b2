"""The timing of bench.py and sweep_blocks.py, on a fake clock."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench_parts


class FakeGpu:
    """CuPy's events and stream, with a clock that calls advance."""

    def __init__(self):
        self.now = 0.0  # milliseconds
        gpu = self

        class Event:
            def record(self):
                self.time = gpu.now

            def synchronize(self):
                pass

        self.cuda = SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda a, b: b.time - a.time,
            get_current_stream=lambda: SimpleNamespace(
                synchronize=lambda: None
            ),
        )


@pytest.fixture
def gpu():
    return FakeGpu()


@pytest.fixture
def timing(gpu, monkeypatch):
    """A copy of the module with the fake instead of CuPy."""
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    path = Path(bench_parts.__file__).parent / "timing.py"
    spec = importlib.util.spec_from_file_location("fake_timing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.time = SimpleNamespace(perf_counter=lambda: gpu.now / 1e3)
    return module


def lasting(gpu, ms, log, name):
    def call():
        gpu.now += ms
        log.append(name)

    return call


def test_rounds_of_one_call(timing, gpu):
    """As sweep_blocks.py does; `before` is not timed."""
    log = []
    found = timing.alternate(
        {
            name: timing.Contender([lasting(gpu, ms, log, name)])
            for name, ms in (("a", 2.0), ("b", 3.0))
        },
        seconds=0,
        fewest=4,
        warm_ms=0,
        round_ms=0,
        before=lasting(gpu, 50.0, log, "-"),
    )
    assert log[-16:] == ["-", "a", "-", "b"] * 4
    assert {name: x.ms for name, x in found.items()} == {"a": 2.0, "b": 3.0}
    assert {x.count for x in found.values()} == {4}


def test_rounds_of_some_milliseconds(timing, gpu):
    log = []
    calls = [lasting(gpu, 5.0, log, x) for x in ("first set", "second set")]
    found = timing.alternate({"a": timing.Contender(calls)}, seconds=0.1)
    assert found["a"].ms == 5.0 and found["a"].count == 20
    assert log[-4:] == ["first set", "second set"] * 2


def test_runners_with_own_streams_are_timed_by_the_clock(timing, gpu):
    """Its calls return at once; the work ends at the wait."""
    log, queued = [], []

    def wait():
        gpu.now += 4.0 * len(queued)
        queued.clear()

    found = timing.alternate(
        {
            "own": timing.Contender([lambda: queued.append(1)], wait=wait),
            "other": timing.Contender([lasting(gpu, 1.0, log, "other")]),
        },
        seconds=0.1,
    )
    assert found["own"].ms == pytest.approx(4.0)
    assert found["other"].ms == 1.0
