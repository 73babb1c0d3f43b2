"""`cuflash.torch` on a device, a GPU or an emulated one: numbers, threads."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import (  # noqa: E402
    assert_equal,
    packed_tensors,
    tensors,
)
from torch_device_calls import (  # noqa: E402
    assert_near_compiled,
    inputs_on,
    kvcache,
    results,
    squares,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_all  # noqa: E402

pytestmark = pytest.mark.slow

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
def test_gradients_of_a_bias(device, dtype):
    """Of each pair once, so that nothing depends on the order of sums."""
    inputs = device.put(tensors(dtype, requires_grad=True))
    bias = tensors(dtype, seqlen_q=4, num_heads_q=5, head_dim=7)[0]
    bias = device.put(bias).requires_grad_()
    out, lse = cuflash.torch.attention(*inputs, bias=bias, return_lse=True)
    dout = torch.full_like(out, 0.5)
    (got,) = torch.autograd.grad(out, bias, dout)
    *_, expected = device.expected(
        cuflash.backward, dout, *inputs, out, lse, bias=bias.detach(),
        return_dbias=True,
    )  # fmt: skip
    assert_equal([got], [expected])


@pytest.mark.parametrize("is_causal", [False, True])
def test_in_torchs_layout(device, is_causal):
    inputs = inputs_on(device, seqlen_q=device.sizes["seqlen_k"])
    heads_first = [x.transpose(1, 2) for x in inputs]
    got = cuflash.torch.scaled_dot_product_attention(
        *heads_first, is_causal=is_causal, enable_gqa=True
    )
    expected = cuflash.torch.attention(*inputs, causal=is_causal)
    assert_equal([got.transpose(1, 2)], [expected])


def test_packed_sequences(device):
    inputs, given = packed_tensors(torch.bfloat16, requires_grad=True)
    got = results(device.put(inputs), **device.put(given))
    with device.left_out():
        expected = results(inputs, **given)
    for x, y in zip(got, expected, strict=True):
        # Rounded once, from sums of less than ten numbers of size 1.
        torch.testing.assert_close(x.cpu(), y, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_further_from_float64_than_sdpa(device, dtype):
    """CONTRIBUTING, "Error": 2 and 3 times the error of plain code."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    inputs = inputs_on(device, dtype, seqlen_q=device.sizes["seqlen_k"])

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
        dout = torch.cos(torch.arange(out.numel(), device=out.device))
        gradients = torch.autograd.grad(
            out, given, dout.view(out.shape).to(out.dtype)
        )
        found.append([x.detach().double() for x in (out, *gradients)])
    for factor, ours, low, exact in zip((2, 3, 3, 3), *found, strict=True):
        ulp = torch.finfo(dtype).eps * exact.abs().max()
        bound = factor * (low - exact).abs().max() + ulp
        assert (ours - exact).abs().max() <= bound


def test_new_threads(device):
    """A thread has no context of CUDA before its first call."""
    inputs = inputs_on(device)
    expected = results(inputs, deterministic=True)
    if device.name == "cuda":
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


def test_nothing_is_taken_from_cupys_pool(device):
    inputs = inputs_on(device)
    shape = [4, device.sizes["seqlen_q"], device.sizes["seqlen_k"]]
    bias = device.put(torch.randn(shape, requires_grad=True))
    before = device.bytes_of_cupy()
    for given in ({}, {"bias": bias}, {"dropout": 0.5, "seed": 1}):
        results(inputs, **given)
    cuflash.torch.attention(*(x[..., ::2] for x in inputs))
    cuflash.torch.forward_kvcache(**device.put(kvcache()))
    assert device.bytes_of_cupy() == before


def test_saved_tensors_can_wait_on_the_cpu(device):
    inputs = inputs_on(device)
    expected = results(inputs, deterministic=True)
    with torch.autograd.graph.save_on_cpu():
        got = results(inputs, deterministic=True)
    assert_equal(got, expected)


# Compiled calls and autocast ------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
def test_a_compiled_checkpoint_keeps_its_dropout(device):
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    inputs = inputs_on(device)

    def layer(q, k, v):
        return cuflash.torch.attention(
            q, k, v, dropout=0.5, deterministic=True
        )

    def again(*inputs):
        return checkpoint(layer, *inputs, use_reentrant=False)

    found = []
    for call in (layer, device.compile(again)):
        torch.manual_seed(0)
        out = call(*inputs)
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    assert_equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own
def test_compiled_calls(device):
    torch._dynamo.reset()
    inputs = inputs_on(device)
    compiled = device.compile(squares)
    for _ in range(2):
        got = torch.autograd.grad(compiled(*inputs), inputs)
    expected = torch.autograd.grad(squares(*inputs), inputs)
    assert_near_compiled(got, expected)


def test_autocast(device):
    inputs = inputs_on(device, torch.float32)
    with torch.autocast(device.name, dtype=torch.float16):
        out = cuflash.torch.attention(*inputs)
    expected = cuflash.torch.attention(*(x.half() for x in inputs))
    assert_equal([out], [expected])


# Bad input ------------------------------------------------------------------


def test_offsets_are_read_where_asked(device, monkeypatch):
    inputs, given = packed_tensors(torch.float32)
    given["cu_seqlens_q"][-1] = 99
    inputs, given = device.put(inputs), device.put(given)
    out = cuflash.torch.attention(*inputs, **given)
    assert_all(out, 0, "out")
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    with pytest.raises(cuflash.ValueRangeError, match=r"cu_seqlens_q\[2\]"):
        cuflash.torch.attention(*inputs, **given)
