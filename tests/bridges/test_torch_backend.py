"""The backend of CUDA tensors without a GPU: a fake CuPy, CPU tensors."""

import importlib
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch import request  # noqa: E402
from helpers import fake_cupy  # noqa: E402

pytestmark = pytest.mark.slow

STREAM = 99


@pytest.fixture
def fake(monkeypatch):
    """A fake CuPy under calls on CPU tensors, which do not compute."""
    fake, _ = fake_cupy.in_place(monkeypatch)
    monkeypatch.delitem(sys.modules, "cuflash.torch.backend", raising=False)
    module = importlib.import_module("cuflash.torch.backend")
    monkeypatch.setattr(module, "_stream", lambda index: STREAM)
    on_cpu = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(module, "_new", on_cpu)
    backend = module.TorchBackend(0)
    backend.tensor_device = torch.device("cpu")
    monkeypatch.setattr(request, "backend_of", lambda x: backend)
    fake.log.clear()
    yield fake
    del sys.modules["cuflash.torch.backend"]


def large(dtype, **more):
    sizes = {"seqlen_q": 300, "seqlen_k": 300, "head_dim": 64}
    return tensors(dtype, **sizes, head_dim_v=64, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_run_on_torchs_stream_and_memory(fake, dtype):
    inputs = large(dtype, requires_grad=True)
    sink = torch.zeros(4)
    bias = torch.zeros(300, 300, dtype=dtype, requires_grad=True)
    for given in ({}, {"sink": sink, "bias": bias}):
        out = cuflash.torch.attention(*inputs, **given)
        out.sum().backward()
    strided = (x[..., ::2] for x in inputs)
    cuflash.torch.attention(*strided)
    assert fake.logged("launch") == [("launch", 0, STREAM)] * len(
        fake.logged("launch")
    )
    assert {x[0] for x in fake.log} == {"launch", "bind"}


@pytest.mark.parametrize("kind", [tuple, torch.Size])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0,)])
def test_new_tensors_are_contiguous(fake, kind, shape):
    backend = request.backend_of(None)
    got, expected = backend.empty(kind(shape), "float32"), torch.empty(shape)
    assert got.shape == expected.shape and got.dtype is expected.dtype
    assert got.stride() == expected.stride()


def test_a_thread_is_bound_once(fake):
    inputs = large(torch.float32)

    def call():
        for _ in range(3):
            cuflash.torch.attention(*inputs)

    for _ in range(2):
        fake.log.clear()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert [x[0] for x in fake.log][:2] == ["bind", "bind"]
        assert len(fake.logged("bind")) == 2
        assert len(fake.logged("launch")) == 3


def test_a_repeated_call_is_looked_up(fake, monkeypatch):
    from cuflash.request.validate import attention as validate

    inputs = large(torch.float32)
    cuflash.torch.attention(*inputs, causal=True)
    monkeypatch.setattr(validate, "signature_of", None)
    before = len(fake.log)
    cuflash.torch.attention(*inputs, causal=True)
    assert len(fake.log) == before + 1


def test_a_call_from_compiled_code_is_looked_up_once(fake, monkeypatch):
    from cuflash.torch import direct, repeated

    inputs = large(torch.float32)
    direct.plain_attention(*inputs, causal=True)
    monkeypatch.setattr(repeated, "checked", None)
    before = len(fake.logged("launch"))
    out, lse = direct.plain_attention(*inputs, causal=True)
    assert out.shape == inputs[0].shape and lse.shape == (2, 4, 300)
    assert len(fake.logged("launch")) == before + 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_flex_attention_makes_no_views(fake, monkeypatch, requires_grad):
    """Nor a decision for a call like one before."""
    from cuflash.request.validate import attention as validate

    inputs = large(torch.float32, batch=1, requires_grad=requires_grad)
    given = [x.detach().transpose(1, 2) for x in inputs]
    mask = cuflash.torch.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 300, 300
    )

    def call():
        leaves = [x.requires_grad_(requires_grad) for x in given]
        flex = cuflash.torch.flex_attention
        out, lse = flex(*leaves, None, mask, enable_gqa=True, return_lse=True)
        if requires_grad:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out, lse

    call()
    monkeypatch.setattr(validate, "signature_of", None)
    monkeypatch.setattr(torch.Tensor, "transpose", None)
    out, lse = call()
    assert out.shape == given[0].shape and lse.shape == (1, 4, 300)


@pytest.mark.parametrize("causal", [1, "yes", [True]])
def test_what_equals_true_is_not_taken_for_it(fake, causal):
    inputs = large(torch.float32)
    cuflash.torch.attention(*inputs, causal=True)
    with pytest.raises(cuflash.DTypeError, match="causal is"):
        cuflash.torch.attention(*inputs, causal=causal)


def test_without_cupy(monkeypatch):
    from cuflash.api import arrays as api_arrays

    def missing():
        raise cuflash.UnsupportedError("arrays on a CUDA device need CuPy")

    monkeypatch.setattr(api_arrays, "on_cuda", missing)
    request._cuda.cache_clear()
    with pytest.raises(cuflash.UnsupportedError, match="need CuPy"):
        request._cuda()
