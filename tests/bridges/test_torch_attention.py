"""`cuflash.torch.attention` on CPU tensors: the numbers of cuflash.forward."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import (  # noqa: E402
    assert_equal,
    expected_gradients,
    on_numpy,
    options,
    packed_tensors,
    tensors,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
by_option = pytest.mark.parametrize("name", options())


@pytest.mark.parametrize("dtype", DTYPES)
@by_option
def test_results_are_those_of_forward(dtype, name):
    inputs, given = tensors(dtype), options(dtype)[name]
    got = cuflash.torch.attention(*inputs, return_lse=True, **given)
    expected = on_numpy(cuflash.forward, *inputs, return_lse=True, **given)
    assert_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@by_option
def test_gradients_are_those_of_backward(dtype, name):
    inputs, given = tensors(dtype, requires_grad=True), options(dtype)[name]
    for option in ("bias", "sink"):
        if option in given:
            inputs.append(given[option].requires_grad_())
    out = cuflash.torch.attention(*inputs[:3], **given)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    assert_equal(got, expected_gradients((dout, None), inputs[:3], given))


def test_packed_sequences():
    inputs, given = packed_tensors(requires_grad=True)
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    assert_equal(
        (out, lse),
        on_numpy(cuflash.forward, *inputs, return_lse=True, **given),
    )
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    assert_equal(got, expected_gradients((dout, None), inputs, given))


@pytest.mark.parametrize("index", [(0,), (0, slice(None), 0)])
def test_axes_that_are_left_out(index):
    q, k, v = tensors(num_heads_kv=4)
    out = cuflash.torch.attention(q[index], k[index], v[index])
    whole = cuflash.torch.attention(q, k, v)
    assert_arrays_equal(out, whole[index], "out")


def test_any_strides():
    q, k, v = tensors(head_dim=12, head_dim_v=12)
    given = (q[..., ::2], k.transpose(1, 2).contiguous().transpose(1, 2))
    out = cuflash.torch.attention(given[0], given[1][..., ::2], v[..., 1::3])
    plain = [x.contiguous() for x in (q[..., ::2], k[..., ::2], v[..., 1::3])]
    assert_arrays_equal(out, cuflash.torch.attention(*plain), "out")


def test_views_that_negate():
    """The imaginary part of a conjugate: its numbers are stored negated."""
    q, k, v = tensors(requires_grad=True)
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    out, lse = cuflash.torch.attention(negated, k, v, return_lse=True)
    plain = cuflash.torch.attention(-q, k, v, return_lse=True)
    assert_equal((out, lse), plain)
    both = [(x.detach().neg()[None].expand(2, *x.shape)) for x in plain]
    weights = [torch.complex(*x).conj().imag for x in both]
    assert all(x.is_neg() for x in weights)
    got = torch.autograd.grad((out, lse), (q, k, v), weights)
    dense = [x.resolve_neg() for x in weights]
    assert_equal(got, torch.autograd.grad(plain, (q, k, v), dense))


def test_a_bias_that_negates():
    inputs, bias = tensors(), options()["bias"]["bias"]
    view = torch.complex(bias, bias).conj().imag
    out = cuflash.torch.attention(*inputs, bias=view)
    assert_arrays_equal(
        out, cuflash.torch.attention(*inputs, bias=-bias), "out"
    )


def test_gradients_of_some_inputs():
    q, k, v = tensors()
    out = cuflash.torch.attention(q, k.requires_grad_(), v)
    out.sum().backward()
    assert q.grad is None and v.grad is None
    whole = [x.detach().requires_grad_() for x in (q, k, v)]
    cuflash.torch.attention(*whole).sum().backward()
    assert_arrays_equal(k.grad, whole[1].grad, "k.grad")


def test_no_grad_builds_no_graph():
    inputs = tensors(requires_grad=True)
    with torch.no_grad():
        assert not cuflash.torch.attention(*inputs).requires_grad
    assert cuflash.torch.attention(*inputs).requires_grad


def test_threads():
    """As torch.nn.DataParallel calls its replicas."""
    inputs = tensors(requires_grad=True)

    def call(_):
        out = cuflash.torch.attention(*inputs, causal=True)
        return torch.autograd.grad(out.sum(), inputs)

    expected = call(0)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(call, range(20)):
            assert_equal(got, expected)


def test_a_changed_input_is_noticed():
    inputs = tensors(requires_grad=True)
    out = cuflash.torch.attention(*inputs)
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["none", "softcap", "bias", "sink"])
def test_gradcheck(name):
    inputs, given = tensors(requires_grad=True), options()[name]
    arrays = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}

    def call(q, k, v, *others):
        named = dict(zip(arrays, others, strict=True))
        return cuflash.torch.attention(q, k, v, **{**given, **named})

    others = [x.requires_grad_() for x in arrays.values()]
    assert torch.autograd.gradcheck(call, (*inputs, *others))


@pytest.fixture
def deterministic():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_a_broadcast_bias_where_order_is_wanted(deterministic):
    inputs, bias = tensors(requires_grad=True), options()["bias"]["bias"]
    bias.requires_grad_()
    expected = cuflash.torch.attention(*inputs, bias=bias).sum()
    (want,) = torch.autograd.grad(expected, bias)
    deterministic(True)
    with pytest.raises(cuflash.UnsupportedError, match="bias is broadcast"):
        cuflash.torch.attention(*inputs, bias=bias).sum().backward()
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match="bias requires grad"):
        out = cuflash.torch.attention(*inputs, bias=bias)
    assert_arrays_equal(torch.autograd.grad(out.sum(), bias)[0], want, "bias")
