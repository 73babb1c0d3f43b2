"""NcclGroup with stand-ins for CuPy and NCCL: what is queued when."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash.distributed import nccl


class Array:
    """An array on a device."""

    def __init__(self, count=3, device=1):
        self.shape, self.size = (count,), count
        self.dtype = np.dtype(np.float32)
        self.data = SimpleNamespace(device_id=device)


class Event:
    def __init__(self, disable_timing):
        assert disable_timing
        self.done = True


class Stream:
    def __init__(self, log, name):
        self.log, self.name, self.ptr = log, name, name

    def record(self, event):
        self.log.append((self.name, "record"))
        return event

    def wait_event(self, event):
        self.log.append((self.name, "wait"))


class Library:
    """NCCL that only notes what it is asked."""

    def __init__(self, log):
        self.log, self.joins = log, threading.Event()
        self.joins.set()
        self.error = None

    def join(self, size, unique_id, rank):
        self.joins.wait(5)
        self.log.append(("join", size, unique_id, rank))
        return SimpleNamespace(abort=lambda: self.log.append("abort"))

    def exchange(self, communicator, sends, receives, stream):
        if self.error:
            raise self.error
        self.log.append(("exchange", len(sends), len(receives), stream))


@pytest.fixture
def library(monkeypatch):
    log = []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDevice=lambda: 1, setDevice=lambda index: None
        ),
        Stream=lambda non_blocking, priority: Stream(log, "own"),
        get_current_stream=lambda: Stream(log, "current"),
        Event=Event,
    )
    cupy = SimpleNamespace(cuda=cuda, ndarray=Array)
    library = Library(log)
    on_cuda = SimpleNamespace(cupy=cupy)
    monkeypatch.setattr(nccl.api_arrays, "on_cuda", lambda: on_cuda)
    monkeypatch.setattr(nccl, "find_library", lambda name: library)
    return library


def group_of(library, timeout=5.0):
    group = nccl.NcclGroup(0, 2, b"id", timeout=timeout)
    library.log.clear()
    return group


def test_the_order_on_streams(library):
    """NCCL's stream waits for the caller's, and that for NCCL's result."""
    group = group_of(library)
    pending = group.exchange([(Array(), 1)], [(Array(), 1)])
    assert library.log == [
        ("current", "record"), ("own", "wait"), ("own", "record"),
        ("exchange", 1, 1, "own"), ("own", "record"),
    ]  # fmt: skip
    pending.wait()
    assert library.log[-1] == ("current", "wait")
    assert group.bytes_sent == 12


def test_a_moment_given(library):
    group = group_of(library)
    moment = group.mark()
    group.exchange([(Array(), 1)], [], moment)
    assert library.log[1] == ("own", "wait")


def test_empty_arrays_are_left_out(library):
    group = group_of(library)
    group.exchange([(Array(0), 1)], [(Array(0), 1)]).wait()
    assert library.log == [] and group.bytes_sent == 0


def test_ranks_that_do_not_join(library):
    library.joins.clear()
    with pytest.raises(cuflash.GroupError, match="waited 0.1 s for 2 ranks"):
        group_of(library, timeout=0.1)
    library.joins.set()


def test_an_error_of_nccl(library):
    group = group_of(library)
    library.error = RuntimeError("unhandled system error")
    with pytest.raises(cuflash.GroupError, match="NCCL failed: unhandled"):
        group.exchange([(Array(), 1)], [])
    assert not group._watchdog._watched


def test_an_array_of_another_device(library):
    group = group_of(library)
    with pytest.raises(cuflash.ValueRangeError, match="expected device 1"):
        group.exchange([(Array(device=0), 1)], [])
    with pytest.raises(cuflash.DTypeError, match="expected a CuPy array"):
        group.exchange([(np.zeros(3), 1)], [])


def test_a_group_that_was_aborted(library):
    group = group_of(library)
    pending = group.exchange([(Array(), 1)], [])
    group._watchdog.expired = True
    for call in (pending.wait, group.synchronize, group.check):
        with pytest.raises(cuflash.GroupError, match="left the group"):
            call()
