"""The gradient of lse."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import (  # noqa: E402
    assert_equal,
    expected_gradients,
    options,
    tensors,
)

import cuflash.torch  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("name", options())
def test_gradients_are_those_of_backward(name, with_out):
    inputs, given = tensors(requires_grad=True), options()[name]
    out, lse = cuflash.torch.attention(*inputs, return_lse=True, **given)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    results, weights = [lse, out], [dlse, dout]
    n = 1 + with_out
    got = torch.autograd.grad(results[:n], inputs, weights[:n])
    douts = (dout if with_out else None, dlse)
    expected = expected_gradients(douts, inputs, given)
    assert_equal(got, expected[:3])


def test_gradcheck():
    inputs = tensors(requires_grad=True)

    def call(*inputs):
        return cuflash.torch.attention(*inputs, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(call, inputs)


def test_a_merge_of_halves_has_the_gradients_of_the_whole():
    q, k, v = tensors(requires_grad=True)

    def whole():
        return cuflash.torch.attention(q, k, v)

    def merged():
        halves = [
            cuflash.torch.attention(q, k[:, part], v[:, part], return_lse=True)
            for part in (slice(None, 3), slice(3, None))
        ]
        lse = torch.stack([lse for _, lse in halves])
        weights = torch.softmax(lse, 0).transpose(-1, -2)[..., None]
        return sum(
            w * out for w, (out, _) in zip(weights, halves, strict=True)
        )

    dout = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(whole(), (q, k, v), dout)
    got = torch.autograd.grad(merged(), (q, k, v), dout)
    # Some hundred operations on numbers of size 1 in float64: 1e-12 leaves
    # ten times the 500 * 2^-53 that they could add up to.
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
