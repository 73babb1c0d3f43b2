"""Bad arguments of `cuflash.torch`, and autocast."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import options, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402

pytestmark = pytest.mark.slow


def refused(error, words, *inputs, **given):
    with pytest.raises(error, match=words):
        cuflash.torch.attention(*inputs, **given)


def test_shapes():
    q, k, v = tensors()
    refused(cuflash.ShapeError, "k has head_dim 7", q, k[..., 1:], v)


def test_an_array_of_numpy():
    q, k, v = tensors()
    words = r"k is of type numpy.ndarray, expected a torch.Tensor"
    refused(cuflash.DTypeError, words, q, k.numpy(), v)
    refused(cuflash.DTypeError, "sink is of", q, k, v, sink=np.ones(4))


@pytest.mark.parametrize("name", ["alibi_slopes"])
def test_options_without_gradients(name):
    given = options()[name]
    given[name].requires_grad_()
    words = f"{name} requires grad, .*differentiable in q, k, v, bias, sink"
    refused(cuflash.UnsupportedError, words, *tensors(), **given)
    with torch.no_grad():
        cuflash.torch.attention(*tensors(), **given)


def test_several_devices():
    q, k, v = tensors()
    words = "k is on meta, expected a CUDA device or the CPU"
    refused(cuflash.UnsupportedError, words, q, k.to("meta"), v)


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def test_autocast_takes_float32_to_its_dtype():
    inputs = tensors(torch.float32, requires_grad=True)
    with autocast():
        out = cuflash.torch.attention(*inputs)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = cuflash.torch.attention(*low)
    assert torch.equal(out, expected) and out.dtype is torch.bfloat16
    got = torch.autograd.grad(out.sum(), inputs)
    want = torch.autograd.grad(expected.sum(), low)
    for x, y in zip(got, want, strict=True):
        assert x.dtype is torch.float32 and torch.equal(x, y.float())


def test_autocast_takes_options_along():
    inputs, given = tensors(torch.float32), options(torch.float32)
    bias, sink = given["bias"]["bias"], given["sink"]["sink"]
    with autocast():
        out = cuflash.torch.attention(
            *inputs, bias=bias.half(), sink=sink.bfloat16()
        )
    expected = cuflash.torch.attention(
        *(x.bfloat16() for x in inputs),
        bias=bias.half().bfloat16(),
        sink=sink.bfloat16().float(),
    )
    assert torch.equal(out, expected)


def test_autocast_refuses_float64():
    with autocast():
        words = "q has dtype float64 under autocast.*pass q.float"
        refused(cuflash.DTypeError, words, *tensors())
