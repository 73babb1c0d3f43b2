"""Arrays of libraries that work on streams of their own, by a fake CuPy."""

import sys
import types

import pytest

import cuflash
from helpers import fake_cupy
from helpers.fake_cupy import STREAM, ndarray

SHAPE = (2, 300, 4, 64)
OTHER = 88  # a stream that is not CuPy's current one


class Foreign:
    """Another library's array: DLPack."""

    def __init__(self, shape=SHAPE, dtype="float16"):
        self.array = ndarray(shape, dtype)

    def __dlpack__(self, **_):
        raise AssertionError

    def __dlpack_device__(self):
        return 2, 0


class Numbas:
    """Another library's array: __cuda_array_interface__."""

    def __init__(self, stream):
        self.array = ndarray(SHAPE, "float16")
        self.__cuda_array_interface__ = {
            "stream": stream, "data": (self.array.data.ptr, False),
            "shape": SHAPE,
        }  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    return fake_cupy.in_place(monkeypatch)[0]


@pytest.fixture
def held():
    found = sys.modules["cuflash.backends.cupy"]._held
    yield found
    found.clear()


def let_torch_work_on(monkeypatch, stream):
    """Put a stand-in for torch in place, whose tensors are `Foreign`."""
    current = types.SimpleNamespace(cuda_stream=stream)
    cuda = types.SimpleNamespace(current_stream=lambda index: current)
    torch = types.SimpleNamespace(Tensor=Foreign, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)


def queued(fake):
    return [x[0] for x in fake.log]


def test_torchs_stream_waits_for_the_kernels(fake, monkeypatch):
    let_torch_work_on(monkeypatch, OTHER)
    out = Foreign()
    cuflash.forward(Foreign(), Foreign(), Foreign(), out=out)
    assert queued(fake) == ["launch", "record", "wait"]
    assert fake.log[1:] == [("record", STREAM), ("wait", OTHER)]


def many(number):
    return [Foreign() for _ in range(number)]


def lse():
    return Foreign((2, 4, 300), "float32")


CALLS = {
    "backward": lambda: cuflash.backward(*many(5), lse()),
    "jvp": lambda: cuflash.jvp(*many(6)),
    "double_backward": lambda: cuflash.double_backward(*many(8), lse()),
    "merge_states": lambda: cuflash.merge_states(
        Foreign(), lse(), Foreign(), lse()
    ),
    "apply_rotary": lambda: cuflash.apply_rotary(
        Foreign(), *(Foreign((300, 32)) for _ in range(2))
    ),
    "forward_kvcache": lambda: cuflash.forward_kvcache(
        *many(3), cache_seqlens=Foreign((2,), "int32")
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_waits_after_each_call(fake, monkeypatch, name):
    let_torch_work_on(monkeypatch, OTHER)
    CALLS[name]()
    assert "launch" in queued(fake) or "overlapping" in queued(fake)
    assert fake.log[-2:] == [("record", STREAM), ("wait", OTHER)]


@pytest.mark.parametrize("kind", ["CuPy's", "torch's", "Numba's"])
def test_one_stream_does_not_wait_for_itself(fake, monkeypatch, kind):
    let_torch_work_on(monkeypatch, STREAM)
    make = {
        "CuPy's": lambda: ndarray(SHAPE, "float16"),
        "torch's": Foreign,
        "Numba's": lambda: Numbas(STREAM),
    }[kind]
    cuflash.forward(make(), make(), make())
    assert queued(fake) == ["launch"]


@pytest.mark.parametrize("named, stream", [(OTHER, OTHER), (1, 0), (2, 2)])
def test_an_interface_names_its_stream(fake, named, stream):
    cuflash.forward(*(Numbas(named) for _ in range(3)))
    assert fake.logged("wait") == [("wait", stream)]


@pytest.mark.parametrize("make", [Foreign, lambda: Numbas(None)])
def test_memory_of_unknown_streams_is_held(fake, held, make):
    def call():
        given = [make() for _ in range(3)]
        cuflash.forward(*given)
        return [x.array for x in given]

    first, second = call(), call()
    assert [x for _, x in held] == [first, second]
    held[0][0].done = True
    third = call()
    assert [x for _, x in held] == [second, third]
    assert not fake.logged("wait")


def test_a_capture_is_left_alone(fake, held, monkeypatch):
    runtime = fake.cuda.runtime
    monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: True)
    cuflash.forward(Foreign(), Foreign(), Foreign())
    assert queued(fake) == ["launch"] and not held
