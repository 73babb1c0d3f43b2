"""`cuflash.torch` on a GPU: numbers, streams, graphs, memory, devices.

What an emulated device can do too is in test_torch_device.py.
"""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from bridge_cases import each_case  # noqa: E402
from torch_cases import TorchCase  # noqa: E402
from torch_data import assert_equal  # noqa: E402
from torch_device_calls import (  # noqa: E402
    assert_near_compiled,
    inputs_on,
    kvcache,
    results,
    squares,
)
from torch_devices import Gpu  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this PyTorch has no CUDA"
    ),
]

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def inputs_on_gpu(*given, **more):
    return inputs_on(Gpu(), *given, **more)


# Numbers, beside those of an emulated device -------------------------------


def by_cupy(inputs, deterministic=False, **given):
    """Return `results` of cuflash's own calls, on CuPy arrays."""
    device = Gpu()
    out, lse = device.expected(
        cuflash.forward, *inputs, return_lse=True, **given
    )
    dout, dlse = (torch.full_like(x, 0.5) for x in (out, lse))
    gradients = device.expected(
        cuflash.backward, dout, *inputs, out, lse, dlse=dlse,
        deterministic=deterministic, **given
    )  # fmt: skip
    return out, lse, *gradients


@each_case
def test_results_are_those_of_cupy_arrays(case):
    call, device = TorchCase(case), Gpu()
    call.tensors = device.put(call.tensors)
    qkv, options = [*call.tensors.values()][:3], [*call.tensors.items()][3:]
    expected = device.expected(
        cuflash.forward, *qkv, **dict(options), **call.numbers, return_lse=True
    )
    assert_equal(call.results(), expected)


@each_dtype
def test_gradients_are_those_of_cupy_arrays(dtype):
    inputs = inputs_on_gpu(dtype)
    given = {"causal": True, "deterministic": True}
    assert_equal(results(inputs, **given), by_cupy(inputs, **given))


# Streams --------------------------------------------------------------------


def keep_busy():
    """Queue some 100 ms of work on the current stream."""
    a = torch.ones((4096, 4096), device="cuda")
    for _ in range(30):
        a = a @ a * 0


@each_dtype
def test_runs_on_the_current_stream(dtype):
    """Inputs arrive late on that stream; another would read zeros."""
    inputs = inputs_on_gpu(dtype)
    expected = results(inputs, causal=True, deterministic=True)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        keep_busy()
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source.detach())
        late = [x.requires_grad_() for x in late]
        got = results(late, causal=True, deterministic=True)
        torch.cuda.current_stream().synchronize()
    assert_equal(got, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_does_not_wait():
    inputs = inputs_on_gpu()
    results(inputs)
    try:
        torch.cuda.set_sync_debug_mode("error")
        results(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# CUDA graphs ----------------------------------------------------------------


def warm_up(call):
    """As PyTorch's documentation says: on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)


@each_dtype
@pytest.mark.parametrize("warm", [False, True])
def test_capture_of_forward_and_backward(dtype, warm):
    inputs = inputs_on_gpu(dtype, seqlen_q=190 + warm)

    def call():
        return results(inputs, causal=True, deterministic=True)

    if warm:
        warm_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(got, call())


def test_capture_of_strides_that_need_copies():
    q, k, v = inputs_on_gpu(head_dim=128, requires_grad=False)

    def call():
        return cuflash.torch.attention(q[..., ::2], k[..., 1::2], v)

    warm_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    q.mul_(0.5)
    graph.replay()
    assert_equal([got], [call()])


# Of the leaves, which are made outside of the capture's stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables():
    """torch.cuda.make_graphed_callables, with gradients."""

    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, causal=True)

    graphed = torch.cuda.make_graphed_callables(call, tuple(inputs_on_gpu()))
    inputs = inputs_on_gpu()
    got, expected = graphed(*inputs), call(*inputs)
    assert_equal([got], [expected])
    dout = torch.ones_like(got)
    for x, y in zip(
        torch.autograd.grad(got, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_capture_of_decoding():
    ours, theirs = (Gpu().put(kvcache()) for _ in range(2))
    warm_up(lambda: cuflash.torch.forward_kvcache(**Gpu().put(kvcache())))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cuflash.torch.forward_kvcache(**ours)
    for _ in range(3):
        graph.replay()
        expected = cuflash.torch.forward_kvcache(**theirs)
        assert_equal([got], [expected])
        for given in (ours, theirs):
            given["cache_seqlens"].add_(1)
            given["k_new"].mul_(0.5)
    assert_equal([ours["k_cache"]], [theirs["k_cache"]])


# Memory ---------------------------------------------------------------------


def test_the_memory_of_a_call_is_returned():
    inputs = inputs_on_gpu()
    results(inputs)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        results(inputs)
    assert torch.cuda.memory_allocated() == before


def test_memory_grows_with_rows():
    """16,384 tokens: a matrix of pairs would be 2 GiB a head."""
    inputs = inputs_on_gpu(
        batch=1, seqlen_q=16384, seqlen_k=16384, requires_grad=False
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cuflash.torch.attention(*inputs, causal=True)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 2 * inputs[0].nbytes


# Compiled calls -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # and so is one
def test_compiled_into_graphs():
    torch._dynamo.reset()
    inputs = inputs_on_gpu()
    compiled = torch.compile(squares, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # graphs are captured after some
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(*inputs), inputs)
        got = [x.clone() for x in got]
    expected = torch.autograd.grad(squares(*inputs), inputs)
    assert_near_compiled(got, expected)


# Bad input ------------------------------------------------------------------


def test_several_devices():
    q, k, v = inputs_on_gpu(requires_grad=False)
    for given, words in (
        ((q, k.cpu(), v), "k is on cpu, expected cuda:0 as q is"),
        ((q.cpu(), k, v), "k is on cuda:0, expected cpu as q is"),
    ):
        with pytest.raises(cuflash.ValueRangeError, match=words):
            cuflash.torch.attention(*given)
    sink = torch.zeros(4)
    with pytest.raises(cuflash.ValueRangeError, match="sink is on cpu"):
        cuflash.torch.attention(q, k, v, sink=sink)
