"""`cuflash.torch` on a GPU: numbers, streams, graphs, memory, threads."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import options, packed_tensors, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this PyTorch has no CUDA"
    ),
]

LARGE = {
    "seqlen_q": 200,
    "seqlen_k": 230,
    "head_dim": 64,
    "head_dim_v": 64,
}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_gpu(tensors):
    """Return leaves on the GPU."""
    return [x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors]


def inputs_on_gpu(dtype=torch.bfloat16, requires_grad=True, **sizes):
    sizes = {**LARGE, **sizes}
    return on_gpu(tensors(dtype, requires_grad=requires_grad, **sizes))


def moved(given):
    return {
        name: x.cuda() if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


def results(inputs, **given):
    """Return out, lse and the gradients of their sums with weights."""
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    dout, dlse = (torch.ones_like(x) * 0.5 for x in (out, lse))
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    return out.detach(), lse.detach(), *gradients


def by_cupy(inputs, **given):
    """Return the same from cuflash's own calls, on CuPy arrays."""
    q, k, v = (x.detach() for x in inputs)
    out, lse = cuflash.forward(q, k, v, return_lse=True, **given)
    out, lse = torch.from_dlpack(out), torch.from_dlpack(lse)
    dout, dlse = (torch.full_like(x, 0.5) for x in (out, lse))
    gradients = cuflash.backward(dout, q, k, v, out, lse, dlse=dlse, **given)
    return out, lse, *map(torch.from_dlpack, gradients)


def assert_equal(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype is y.dtype and torch.equal(x, y)


@each_dtype
@pytest.mark.parametrize("name", options())
def test_results_are_those_of_cupy_arrays(dtype, name):
    inputs = on_gpu(tensors(dtype, requires_grad=True))
    given = moved(options(dtype)[name])
    got = cuflash.torch.attention(*inputs, return_lse=True, **given)
    q, k, v = (x.detach() for x in inputs)
    expected = cuflash.forward(q, k, v, return_lse=True, **given)
    assert_equal(got, map(torch.from_dlpack, expected))


@each_dtype
def test_gradients_are_those_of_cupy_arrays(dtype):
    inputs = inputs_on_gpu(dtype)
    expected = by_cupy(inputs, causal=True)
    got = results(inputs, causal=True, deterministic=True)
    # The CuPy call adds to dq in any order: 230 keys are at most 8 tiles, so
    # each of two sums has 8 roundings of half an eps.
    size = expected[2].abs().max()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got[2], expected[2], rtol=0, atol=8 * eps * size
    )
    assert_equal(
        (*got[:2], *got[3:]),
        (*expected[:2], *expected[3:]),
    )


@each_dtype
def test_gradients_of_a_bias(dtype):
    """Of each pair once, so that nothing depends on the order of sums."""
    inputs = on_gpu(tensors(dtype, requires_grad=True))
    (bias,) = on_gpu(tensors(dtype, seqlen_q=4, num_heads_q=5, head_dim=7)[:1])
    bias.requires_grad_()
    out, lse = cuflash.torch.attention(*inputs, bias=bias, return_lse=True)
    dout = torch.full_like(out, 0.5)
    (got,) = torch.autograd.grad(out, bias, dout)
    q, k, v, out, lse, bias = (x.detach() for x in (*inputs, out, lse, bias))
    *_, expected = cuflash.backward(
        dout, q, k, v, out, lse, bias=bias, return_dbias=True
    )
    assert_equal([got], [torch.from_dlpack(expected)])


@pytest.mark.parametrize("is_causal", [False, True])
def test_in_torchs_layout(is_causal):
    inputs = inputs_on_gpu(seqlen_q=230)
    heads_first = [x.transpose(1, 2) for x in inputs]
    got = cuflash.torch.scaled_dot_product_attention(
        *heads_first, is_causal=is_causal, enable_gqa=True
    )
    expected = cuflash.torch.attention(*inputs, causal=is_causal)
    assert torch.equal(got.transpose(1, 2), expected)


def test_packed_sequences():
    inputs, given = packed_tensors(torch.bfloat16, requires_grad=True)
    got = results(on_gpu(inputs), **moved(given))
    expected = results(inputs, **given)
    for x, y in zip(got, expected, strict=True):
        # Rounded once, from sums of less than ten numbers of size 1.
        torch.testing.assert_close(x.cpu(), y, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_further_from_float64_than_sdpa(dtype):
    """CONTRIBUTING, "Error": 2 and 3 times the error of plain code."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    inputs = inputs_on_gpu(dtype, seqlen_q=200, seqlen_k=200)

    def theirs(inputs):
        turned = (x.transpose(1, 2) for x in inputs)
        return sdpa(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = []
    for attention, given in (
        (lambda x: cuflash.torch.attention(*x, causal=True), inputs),
        (theirs, inputs),
        (theirs, wide),
    ):
        out = attention(given)
        dout = torch.cos(torch.arange(out.numel(), device="cuda"))
        gradients = torch.autograd.grad(
            out, given, dout.view(out.shape).to(out.dtype)
        )
        found.append([x.detach().double() for x in (out, *gradients)])
    for factor, ours, low, exact in zip((2, 3, 3, 3), *found, strict=True):
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        bound = factor * (low - exact).abs().max() + ulp
        assert (ours - exact).abs().max() <= bound


# Streams and threads --------------------------------------------------------


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


def test_new_threads():
    """A thread has no context of CUDA before its first call."""
    inputs = inputs_on_gpu()
    expected = results(inputs, deterministic=True)
    torch.cuda.synchronize()
    found = []

    def call():
        found.append(results(inputs, deterministic=True))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for got in found:
        assert_equal(got, expected)


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
    assert torch.equal(got, call())


# Of the leaves, which are made outside of the capture's stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables():
    """torch.cuda.make_graphed_callables, with gradients."""

    def call(q, k, v):
        return cuflash.torch.attention(q, k, v, causal=True)

    graphed = torch.cuda.make_graphed_callables(call, tuple(inputs_on_gpu()))
    inputs = inputs_on_gpu()
    got, expected = graphed(*inputs), call(*inputs)
    assert torch.equal(got, expected)
    dout = torch.ones_like(got)
    for x, y in zip(
        torch.autograd.grad(got, inputs, dout),
        torch.autograd.grad(expected, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def kvcache():
    """Return the arguments of a step of decoding."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        x = torch.randn(shape, generator=generator)
        return x.to("cuda", torch.bfloat16)

    return {
        "q": normal(2, 1, 8, 64),
        "k_cache": normal(2, 700, 2, 64),
        "v_cache": normal(2, 700, 2, 64),
        "k_new": normal(2, 1, 2, 64),
        "v_new": normal(2, 1, 2, 64),
        "cache_seqlens": torch.tensor([600, 5], dtype=torch.int32).cuda(),
    }


def test_capture_of_decoding():
    ours, theirs = kvcache(), kvcache()
    warm_up(lambda: cuflash.torch.forward_kvcache(**kvcache()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cuflash.torch.forward_kvcache(**ours)
    for _ in range(3):
        graph.replay()
        expected = cuflash.torch.forward_kvcache(**theirs)
        assert torch.equal(got, expected)
        for given in (ours, theirs):
            given["cache_seqlens"].add_(1)
            given["k_new"].mul_(0.5)
    assert torch.equal(ours["k_cache"], theirs["k_cache"])


# Memory ---------------------------------------------------------------------


def test_nothing_is_taken_from_cupys_pool(cp):
    inputs = inputs_on_gpu()
    bias = torch.randn(4, 200, 230, device="cuda", requires_grad=True)
    pool = cp.get_default_memory_pool()
    before = pool.total_bytes()
    for given in ({}, {"bias": bias}, {"dropout": 0.5, "seed": 1}):
        results(inputs, **given)
        cuflash.torch.attention(*(x[..., ::2] for x in inputs))
    cuflash.torch.forward_kvcache(**kvcache())
    assert pool.total_bytes() == before


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


def test_saved_tensors_can_wait_on_the_cpu():
    inputs = inputs_on_gpu()
    expected = results(inputs, deterministic=True)
    with torch.autograd.graph.save_on_cpu():
        got = results(inputs, deterministic=True)
    assert_equal(got, expected)


# Compiled calls and autocast ------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
def test_a_compiled_checkpoint_keeps_its_dropout():
    from torch.utils.checkpoint import checkpoint

    inputs = inputs_on_gpu()

    def layer(q, k, v):
        return cuflash.torch.attention(
            q, k, v, dropout=0.5, deterministic=True
        )

    def again(*inputs):
        return checkpoint(layer, *inputs, use_reentrant=False)

    found = []
    for call in (layer, torch.compile(again, fullgraph=True)):
        torch.manual_seed(0)
        out = call(*inputs)
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    assert_equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # and so is one
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_calls(mode):
    torch._dynamo.reset()
    inputs = inputs_on_gpu()

    def call(q, k, v):
        out = cuflash.torch.attention(q * 2, k, v, causal=True)
        return (out * 2).float().square().sum()

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(4):  # graphs are captured after some
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(*inputs), inputs)
        got = [x.clone() for x in got]
    expected = torch.autograd.grad(call(*inputs), inputs)
    for x, y in zip(got, expected, strict=True):
        error = (x - y).float().abs().max()
        # Inductor leaves out roundings to bfloat16 between operations.
        assert error <= 4 * 2.0**-7 * y.float().abs().max()


def test_autocast():
    inputs = inputs_on_gpu(torch.float32)
    with torch.autocast("cuda", dtype=torch.float16):
        out = cuflash.torch.attention(*inputs)
    expected = cuflash.torch.attention(*(x.half() for x in inputs))
    assert torch.equal(out, expected)


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


def test_offsets_are_read_where_asked(monkeypatch):
    inputs, given = packed_tensors(torch.float32)
    given = moved(given)
    given["cu_seqlens_q"][-1] = 99
    inputs = on_gpu(inputs)
    out = cuflash.torch.attention(*inputs, **given)
    assert not out.any()
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with pytest.raises(cuflash.ValueRangeError, match=r"cu_seqlens_q\[2\]"):
        cuflash.torch.attention(*inputs, **given)
