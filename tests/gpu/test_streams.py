"""Calls use only the current stream: order, capture in a CUDA graph."""

import numpy as np
import pytest

from cuflash.build import nvrtc
from cuflash.launch import attention as execute
from helpers.backends import CupyBackend
from helpers.calls import all_results
from helpers.compare import assert_bitwise, assert_elements
from helpers.data import Case, inputs

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@pytest.fixture
def stream(cp):
    """A stream that the null stream does not wait for."""
    stream = cp.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()


def inputs_on_gpu(dtype, seed=0, head_dim=64):
    case = Case(dtype, 2, 200, 230, 4, 2, head_dim, head_dim, seed=seed)
    return [GPU.place(x) for x in inputs(case)]


def hosts(arrays):
    return [np.asarray(x.get()) for x in arrays]


def keep_busy(cp):
    """Queue some 100 ms of work on the current stream."""
    a = cp.ones((4096, 4096), cp.float32)
    for _ in range(30):
        a = a @ a * cp.float32(0)


@each_dtype
def test_runs_on_the_current_stream(cp, stream, dtype):
    """Inputs arrive late on that stream; another would read zeros."""
    arrays = inputs_on_gpu(dtype)
    want = hosts(all_results(*arrays))
    late = [cp.zeros_like(x) for x in arrays]
    cp.cuda.Device().synchronize()
    with stream:
        keep_busy(cp)
        for target, source in zip(late, arrays, strict=True):
            target[...] = source
        got = all_results(*late)
        got = hosts(got)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, "result")


@each_dtype
def test_does_not_wait_for_the_device(cp, stream, dtype):
    """A call returns while earlier work on its stream still runs."""
    arrays = inputs_on_gpu(dtype)
    with stream:
        all_results(*arrays)
        keep_busy(cp)  # allocates now, so that the next time it does not
        stream.synchronize()
        keep_busy(cp)
        all_results(*arrays)
        assert not stream.done
        stream.synchronize()


def captured(stream, arrays):
    """Record calls into a CUDA graph; return it and their results."""
    stream.begin_capture()
    results = all_results(*arrays)
    return stream.end_capture(), results


def replayed(stream, graph, results, arrays, others):
    """Overwrite a graph's input arrays, then launch it."""
    for target, source in zip(arrays, others, strict=True):
        target.data.copy_from_device_async(source.data, source.nbytes, stream)
    for result in results:
        result.data.memset_async(0xFF, result.nbytes, stream)
    graph.launch(stream)
    stream.synchronize()
    return hosts(results)


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_graph_capture(cp, stream, dtype, head_dim):
    """Replays read what stands in the inputs then, and write results alone.

    Not to arrays that CuPy's pool gives others after the capture.
    """
    arrays, *others = (
        inputs_on_gpu(dtype, seed, head_dim) for seed in range(3)
    )
    wants = [hosts(all_results(*x)) for x in others]
    cp.cuda.Device().synchronize()
    with stream:
        all_results(*arrays)  # compiles, and fills the pool of this stream
        graph, results = captured(stream, arrays)
        later = [
            cp.full(4 << n, 7, np.uint8)
            for n in range(8, 21)
            for _ in range(9)
        ]
        for other, want in zip(others, wants, strict=True):
            got = replayed(stream, graph, results, arrays, other)
            for a, b in zip(got, want, strict=True):
                assert_bitwise(a, b, "result")
        for array in later:
            assert_elements(hosts([array])[0], 7, "a later array")


def forget_calls(monkeypatch):
    """Make the next call load modules and make plans as the first did."""
    from cuflash.backends import cupy as gpu

    monkeypatch.setattr(nvrtc, "_functions", {})
    execute.launched_forward.cache_clear()
    execute.launched_backward.cache_clear()
    execute._forward_recipe.cache_clear()
    execute._backward_recipe.cache_clear()
    gpu._tensor_map.cache_clear()


@each_dtype
def test_the_first_call_of_its_kind_can_be_captured(
    cp, stream, monkeypatch, dtype
):
    """Loads modules and encodes TensorMaps during the capture."""
    arrays, other = (inputs_on_gpu(dtype, seed) for seed in range(2))
    want = hosts(all_results(*other))
    cp.cuda.Device().synchronize()
    with stream:
        all_results(*arrays)  # fills the pool: to allocate is not allowed
        forget_calls(monkeypatch)
        graph, results = captured(stream, arrays)
        got = replayed(stream, graph, results, arrays, other)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, "result")


def test_threads_with_streams_of_their_own(cp):
    """Concurrent calls from many threads, including a kernel's first."""
    from concurrent.futures import ThreadPoolExecutor

    def work(seed):
        with cp.cuda.Stream(non_blocking=True):
            return hosts(all_results(*inputs_on_gpu("float16", seed)))

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(16)))
    for seed, results in enumerate(got):
        for a, b in zip(results, work(seed), strict=True):
            assert_bitwise(a, b, f"result of seed {seed}")
