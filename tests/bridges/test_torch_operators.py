"""torch.library.opcheck of the operators."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.library import opcheck  # noqa: E402
from torch_data import options, packed_tensors, tensors  # noqa: E402
from torch_schemas import SCHEMAS  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of opcheck
]

attention = torch.ops.cuflash.attention.default


def arguments(given):
    """Return options as the operator takes them."""
    given = dict(given)
    if "window" in given:
        given["window_left"], given["window_right"] = given.pop("window")
    if "seed" in given:
        given["seed"] -= 2**64
    for name in ("bias", "sink"):
        if name in given:
            given[name].requires_grad_()
    return given


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_kept(name):
    operator = getattr(torch.ops.cuflash, name).default
    assert str(operator._schema) == SCHEMAS[name]


@pytest.mark.parametrize("name", options())
def test_attention(name):
    given = arguments(options(torch.float32)[name])
    opcheck(attention, tensors(torch.float32, requires_grad=True), given)


def test_plain_attention():
    opcheck(
        torch.ops.cuflash.plain_attention.default,
        tensors(torch.float32, requires_grad=True),
        {"causal": True, "scale": 0.5},
    )


def test_plain_attention_backward():
    q, k, v = tensors(torch.float32)
    out, lse = attention(q, k, v)
    opcheck(
        torch.ops.cuflash.plain_attention_backward.default,
        (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse),
    )


def test_packed_attention():
    opcheck(attention, *packed_tensors(torch.float32, requires_grad=True))


@pytest.mark.parametrize("shape", [(5, 4, 8), (5, 8)])
def test_fewer_axes(shape):
    opcheck(attention, [torch.randn(shape) for _ in range(3)])


@pytest.mark.parametrize("dbias", [False, True])
@pytest.mark.parametrize("dsink", [False, True])
def test_attention_backward(dbias, dsink):
    q, k, v = tensors(torch.float16)
    bias, sink = torch.randn(4, 5, 7), torch.randn(4)
    out, lse = attention(q, k, v, bias, sink)
    opcheck(
        torch.ops.cuflash.attention_backward.default,
        (torch.randn_like(out), None, q, k, v, out, lse, bias, sink),
        {"return_dbias": dbias, "return_dsink": dsink},
    )


@pytest.mark.parametrize("name", ["attention", "plain_attention"])
def test_second_derivatives_are_refused(name):
    inputs = tensors(requires_grad=True)
    out, _ = getattr(torch.ops.cuflash, name)(*inputs)
    (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(cuflash.UnsupportedError, match="second derivatives"):
        dq.sum().backward()
