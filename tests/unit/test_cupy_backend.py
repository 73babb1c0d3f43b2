"""CuPy's backend without CuPy: allocations, copies and launches."""

import sys

import numpy as np
import pytest

import cuflash
from cuflash.backends.base import Backend, Target
from cuflash.backends.emulator.machine import Emulator
from cuflash.build import nvrtc
from cuflash.launch import attention as execute
from cuflash.plans.workspace import ALIGNMENT
from cuflash.request.validate import attention as validate
from helpers import fake_cupy
from helpers.fake_cupy import STREAM, ndarray

SHAPE = (2, 300, 4, 64)


@pytest.fixture
def fake(monkeypatch):
    return fake_cupy.in_place(monkeypatch)[0]


@pytest.fixture
def structs(fake, monkeypatch):
    """Log the argument structs launched from now on."""

    def launch(backend, loaded, arguments, kind):
        found.append(np.frombuffer(arguments, kind)[0])
        original(backend, loaded, arguments, kind)

    backend = sys.modules["cuflash.backends.cupy"].CupyBackend
    original, found = backend.launch, []
    monkeypatch.setattr(backend, "launch", launch)
    return found


@pytest.mark.parametrize("family", ["simt", "sm80", None])
def test_forgotten_backends_read_the_environment_again(
    fake, monkeypatch, family
):
    module = sys.modules["cuflash.backends.cupy"]
    before = module.backend(0)
    assert module.backend(0) is before and before.family is None
    if family:
        monkeypatch.setenv("CUFLASH_FAMILY", family)
    module.forget_backends()
    assert module.backend(0) is not before
    assert module.backend(0).family == family


def inputs(dtype="float16", **changes):
    arrays = {x: ndarray(SHAPE, dtype) for x in ("dout", "q", "k", "v", "out")}
    arrays["lse"] = ndarray((2, 4, 300), "float32")
    return {**arrays, **changes}


def forward(**changes):
    given = inputs(**changes)
    options = {x: y for x, y in given.items() if x not in inputs()}
    return cuflash.forward(given["q"], given["k"], given["v"], **options)


def test_forward_allocates_results_alone(fake, structs):
    out, lse = forward(return_lse=True)
    assert (out.shape, lse.shape) == (SHAPE, (2, 4, 300))
    assert fake.log == [("launch", 0, STREAM)]
    (struct,) = structs
    assert struct["arrays"]["out"] == out.data.ptr
    assert struct["arrays"]["lse"] == lse.data.ptr


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_graph_keeps_its_memory(fake, monkeypatch, is_captured):
    """Or arrays made after a capture would share it with the replays."""
    module, runtime = sys.modules["cuflash.backends.cupy"], fake.cuda.runtime
    monkeypatch.setattr(runtime, "streamIsCapturing", lambda _: is_captured)
    monkeypatch.setattr(module, "_of_graphs", kept := [])
    cuflash.backward(**inputs())
    ((_, start, _),) = fake.logged("alloc")
    assert [x.ptr for x in kept] == [start] * is_captured


def test_backward_has_one_allocation_for_all_buffers(fake, structs):
    gradients = cuflash.backward(**inputs(), deterministic=True)
    ((_, start, nbytes),) = fake.logged("alloc")
    arrays = structs[0]["arrays"]
    names = "delta", "dq_sum", "tile_counter", "dq_semaphores"
    buffers = [int(arrays[name]) for name in names]
    assert buffers[0] == start and buffers == sorted(buffers)
    assert all(start <= x < start + nbytes for x in buffers)
    assert not any(x % ALIGNMENT for x in buffers)
    assert len(fake.logged("launch")) == 3
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert arrays[name] == gradient.data.ptr


def test_options_without_buffers_allocate_nothing(fake, structs):
    sink = ndarray((4,), "float32")
    forward(sink=sink, softcap=3.0)
    assert not fake.logged("alloc")
    (struct,) = structs
    assert struct["sink"] == sink.data.ptr
    assert struct["tile_order"] == struct["bias"] == 0
    assert struct["options"]["softcap"] == 3.0


def test_workspaces_share_an_allocation(fake, structs):
    ids = ndarray((2, 300), "int32")
    forward(segment_ids_q=ids, segment_ids_k=ids)
    ((_, start, _),) = fake.logged("alloc")
    assert structs[0]["query_tile_ids"] == start


def test_a_bias_in_16_bits_has_its_gradient_converted(fake, structs):
    bias = ndarray((4, 300, 300), "float16")
    *_, dbias = cuflash.backward(**inputs(), bias=bias, return_dbias=True)
    assert (dbias.shape, dbias.dtype) == (bias.shape, np.float16)
    sums = int(structs[0]["dbias"])
    assert fake.logged("fill") == [("fill", sums, 0)]
    assert fake.logged("copy") == [("copy", dbias.data.ptr, sums)]


def test_misaligned_rows_are_copied(fake, structs):
    strides = (300 * 4 * 65 * 2, 4 * 65 * 2, 65 * 2, 2)
    q = ndarray(SHAPE, "float16", strides=strides)
    forward(q=q)
    ((_, copy, source),) = fake.logged("copy")
    assert source == q.data.ptr and structs[0]["arrays"]["q"] == copy


def test_a_call_runs_on_the_device_of_its_arrays(fake):
    with fake.cuda.Device(1):
        arrays = {name: ndarray(SHAPE, "float16") for name in "qkv"}
    cuflash.forward(**arrays)
    assert fake.log == [("launch", 1, STREAM)]
    assert fake.device == 0


def test_kernels_are_loaded_on_the_device_of_the_arrays(fake, monkeypatch):
    def function(kernel, device):
        loaded_on.append(fake.device)
        return fake_cupy.Function

    loaded_on = []
    monkeypatch.setattr(nvrtc, "function", function)
    with fake.cuda.Device(1):
        arrays = inputs()
    cuflash.forward(*(arrays[name] for name in "qkv"))
    cuflash.backward(**arrays)
    assert set(loaded_on) == {1}


def test_a_queue_launches_on_its_stream(fake):
    queue = sys.modules["cuflash.backends.cupy"].Queue(42)
    kernel = fake_cupy.Function.kernel
    launches = ((kernel, 1, 32, 0, False), (kernel, 1, 32, 0, True))
    queue.launch(launches, b"", None)
    assert fake.log[-2:] == [("launch", 0, 42), ("overlapping", 0, 42)]


def test_a_launch_that_overlaps(fake):
    config = sys.modules["cuflash.backends.cupy"]._overlapping(7, 64, 256, 42)
    sizes = config.gridDimX, config.blockDimX, config.sharedMemBytes
    assert (*sizes, int(config.hStream)) == (7, 64, 256, 42)
    (attribute,) = config.attrs
    assert attribute.id.name.endswith("PROGRAMMATIC_STREAM_SERIALIZATION")
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert config.numAttrs == 1


def test_a_queue_fills_and_reads_memory(fake):
    runtime = fake.cuda.runtime
    queue = sys.modules["cuflash.backends.cupy"].Queue(42)
    queue.clear(64, 8)
    assert queue.read(64, 3) == b"abc"
    runtime.memsetAsync.assert_called_once_with(64, 0, 8, 42)
    runtime.streamSynchronize.assert_called_once_with(42)


def test_a_bridge_replaces_the_array_methods(fake):
    """As PyTorch's would: another allocator, another stream."""

    class Bridge(sys.modules["cuflash.backends.cupy"].CupyBackend):
        def empty(self, shape, dtype):
            made.append(ndarray(shape, dtype))
            return made[-1]

        def stream(self):
            return 99

    made, arrays = [], inputs()
    call = validate.forward(arrays["q"], arrays["k"], arrays["v"])
    out, _ = execute.forward(call, Bridge(0))
    assert made == [out] and fake.log == [("launch", 0, 99)]


def test_backends_implement_the_protocol(fake):
    wanted = {x for x in {**vars(Backend), **vars(Target)} if x[0] != "_"}
    assert wanted >= {"empty", "zeros", "copy", "address", "launch", "stream"}
    ours = sys.modules["cuflash.backends.cupy"].CupyBackend(0)
    emulated = Emulator("sm_80")
    assert wanted <= set(dir(ours))
    assert wanted <= {*dir(emulated.backend()), *dir(emulated)}


@pytest.mark.parametrize("khz, expected", [(2_000_000, 2048), (0, None)])
def test_a_device_has_the_name_and_bandwidth_of_its_gpu(fake, khz, expected):
    """2 GHz, 4096 bits, twice per clock; some drivers know no clock."""
    properties = fake.cuda.runtime.getDeviceProperties(0)
    properties["memoryClockRate"] = khz
    device = sys.modules["cuflash.backends.cupy"].device(0)
    assert (device.name, device.bandwidth) == ("A fake GPU", expected)
