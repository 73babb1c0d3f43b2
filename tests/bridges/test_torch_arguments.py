"""Bad arguments of `cuflash.torch`, and autocast."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import options, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

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
    words = "k is on meta, expected cpu as q is"
    refused(cuflash.ValueRangeError, words, q, k.to("meta"), v)


def test_values_that_are_no_tensors_name_what_makes_one():
    inputs = tensors()
    with_lists = {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 5]}
    words = r"cu_seqlens_q is of type list.*torch.tensor\(cu_seqlens_q\)"
    refused(cuflash.DTypeError, words, *inputs, **with_lists)
    words = r"mask is of type numpy.ndarray.*torch.from_dlpack\(mask\)"
    refused(cuflash.DTypeError, words, *inputs, mask=np.ones(5, bool))


def test_sparse_and_nested_tensors():
    q, k, v = tensors()
    words = r"k has layout torch.sparse_coo, .*pass k.to_dense\(\)"
    refused(cuflash.UnsupportedError, words, q, k.to_sparse(), v)
    nested = torch.nested.nested_tensor(
        list(q), layout=torch.jagged, dtype=q.dtype
    )
    words = r"q has layout torch.jagged, .*values\(\) and offsets\(\).*cu_seq"
    refused(cuflash.UnsupportedError, words, nested, nested, nested)


def test_calls_of_cuflash_itself_name_the_bridge():
    q, k, v = tensors()
    words = (
        r"q is a torch.Tensor on the CPU, .*\(cuflash.torch.attention takes it"
    )
    with pytest.raises(cuflash.UnsupportedError, match=words):
        cuflash.forward(q, k, v)
    words = "for automatic differentiation write cuflash.torch.attention"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        cuflash.forward(q.clone().requires_grad_(), k, v)


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def test_autocast_takes_float32_to_its_dtype():
    inputs = tensors(torch.float32, requires_grad=True)
    with autocast():
        out = cuflash.torch.attention(*inputs)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = cuflash.torch.attention(*low)
    assert_arrays_equal(out, expected, "out")
    assert out.dtype is torch.bfloat16
    got = torch.autograd.grad(out.sum(), inputs)
    want = torch.autograd.grad(expected.sum(), low)
    for x, y in zip(got, want, strict=True):
        assert x.dtype is torch.float32
        assert_arrays_equal(x, y.float(), "x")


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
    assert_arrays_equal(out, expected, "out")


def test_autocast_refuses_float64():
    with autocast():
        words = "q has dtype float64 under autocast.*pass q.float"
        refused(cuflash.DTypeError, words, *tensors())
