"""cuflash.flash_attn on a device: a GPU, or an emulated one."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import (  # noqa: E402
    assert_close,
    int32,
    normal,
    offsets,
    packed_qkv,
    qkv,
    slopes,
)
from flash_attn_oracle import (  # noqa: E402
    dense,
    packed,
    tolerance,
    tolerance_of_gradients,
)

import cuflash.torch  # noqa: E402
from cuflash import flash_attn  # noqa: E402
from cuflash.flash_attn import rotation  # noqa: E402
from cuflash.flash_attn.bert_padding import (  # noqa: E402
    pad_input,
    unpad_input,
)
from cuflash.flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
from helpers.compare import assert_all, assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": slopes(2, 4)},
}


@pytest.fixture
def never_wait(device):
    """Raise where the host would wait for the device, if that is a GPU."""

    def run(function):
        if device.name == "cpu":
            return function()
        function()  # compiles and loads
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float64_is_as_exact_as_on_the_cpu(device, options):
    inputs = qkv(40, 50, grad=True)
    leaves = device.put(inputs)
    out, lse, _ = flash_attn.flash_attn_func(
        *leaves, **device.put(options), return_attn_probs=True
    )
    want, want_lse = dense(*inputs, **options)
    dout = normal(*want.shape, seed=5)
    got = torch.autograd.grad(out, leaves, device.put(dout))
    expected = torch.autograd.grad(want, inputs, dout)
    assert_close(out.cpu(), want, tolerance(*inputs, 50))
    assert_close(lse.cpu(), want_lse, tolerance(*inputs, 50))
    atol = tolerance_of_gradients(*inputs, dout, 50)
    for x, y in zip(got, expected, strict=True):
        assert_close(x.cpu(), y, atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_those_of_attention(device, dtype):
    sizes = device.sizes["seqlen_k"], device.sizes["seqlen_k"]
    inputs = qkv(*sizes, head_dim=device.sizes["head_dim"])
    q, k, v = device.put([x.to(dtype) for x in inputs])
    got = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, -1))
    want = cuflash.torch.attention(q, k, v, causal=True, window=(9, None))
    assert_arrays_equal(got, want, "got")


def test_keys_of_which_some_are_used(device, never_wait):
    q, k, v = packed_qkv(9, 12)
    given = device.put([q, k, v, offsets([3, 6]), offsets([5, 7])])
    used = device.put(int32(4, 2))
    out = never_wait(
        lambda: flash_attn.flash_attn_varlen_func(
            *given, 6, 7, causal=True, seqused_k=used
        )
    )
    keys, values = (torch.cat([x[:4], x[5:7]]) for x in (k, v))
    want, _ = packed(q, keys, values, (3, 6), (4, 2), causal=True)
    assert_close(out.cpu(), want, tolerance(q, k, v))


def test_pages(device, never_wait):
    q, k, v = packed_qkv(4, 8, head_dim=64)
    table = device.put(torch.tensor([[1], [0]], dtype=torch.int32))
    pages = device.put([x.view(2, 4, 2, 64)[[1, 0]] for x in (k, v)])
    given = device.put([q, offsets([1, 3]), offsets([4, 4])])
    out = never_wait(
        lambda: flash_attn.flash_attn_varlen_func(
            given[0], *pages, *given[1:], 3, 4, block_table=table, causal=True
        )
    )
    want, _ = packed(q, k, v, (1, 3), (4, 4), causal=True)
    assert_close(out.cpu(), want, tolerance(q, k, v))


def captured(step):
    """A graph of a step that has run on a side stream, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
def test_a_decoding_step_in_a_graph():
    """Each replay appends one token and attends to all before it."""
    q, k, v = qkv(3, 3, batch=1)
    one = [x[:, :1].cuda() for x in (q, k, v)]
    caches = torch.zeros(2, 1, 8, 2, 8, dtype=torch.float64, device="cuda")
    length = int32(0).cuda()

    def step():
        return flash_attn.flash_attn_with_kvcache(
            one[0], *caches, *one[1:], cache_seqlens=length, causal=True
        )

    graph, out = captured(step)
    want, _ = dense(q, k, v, causal=True)
    for i in range(3):
        for static, x in zip(one, (q, k, v), strict=True):
            static.copy_(x[:, i : i + 1])
        length.fill_(i)
        graph.replay()
        assert_close(out.cpu(), want[:, i : i + 1], tolerance(q, k, v))


@pytest.mark.parametrize("offset", [2, int32(1, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rotation_is_that_of_the_cpu(device, dtype, offset, never_wait):
    x = normal(2, 5, 3, 8).to(dtype)
    cos, sin = normal(9, 3).to(dtype), normal(9, 3, seed=1).to(dtype)
    with device.left_out():
        want = apply_rotary_emb(x, cos, sin, seqlen_offsets=offset)
    there, given = device.put(offset), device.put([x, cos, sin])
    got = never_wait(lambda: apply_rotary_emb(*given, seqlen_offsets=there))
    assert rotation.kernel_backend(given[0]) is not None
    eps = torch.finfo(dtype).eps  # a fused product and sum rounds once less
    torch.testing.assert_close(got.cpu(), want, rtol=eps, atol=8 * 2.0**-23)


def test_dropout_draws_without_waiting(device, never_wait):
    inputs = qkv(64, 64, head_dim=device.sizes["head_dim"])
    q, k, v = device.put([x.bfloat16() for x in inputs])

    def run():
        return flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)

    first, second = never_wait(run), run()
    assert not torch.equal(first, second)


def test_a_padded_batch(device):
    x = device.put(normal(2, 4, 3, 4, 64))
    mask = device.put(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]))
    tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(
        tokens, cu_seqlens, longest
    )
    padded = pad_input(out, indices, 2, 4).cpu()
    want, _ = dense(*x[:1, :2].cpu().unbind(2))
    assert_close(padded[:1, :2], want, tolerance(*x[0].cpu().unbind(1)))
    assert_all(padded[0, 2:], 0, "padded[0, 2:]")
