"""`flex_attention` on a device: the bits of `attention` on transposed tensors.

It hands tensors to kernels as they are, heads before tokens.
"""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import assert_equal, tensors  # noqa: E402

from cuflash.torch import (  # noqa: E402
    attention,
    create_block_mask,
    flex_attention,
)
from helpers import emulated_torch  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

SEQLEN = 65
MASK = create_block_mask(
    lambda b, h, i, j: i >= j, None, None, SEQLEN, SEQLEN
)  # fmt: skip


def by_heads(q, k, v, score, mask, order=lambda x: x):
    given = (order(x.transpose(1, 2)) for x in (q, k, v))
    out, lse = flex_attention(
        *given, score, mask, enable_gqa=True, return_lse=True
    )
    assert out.transpose(1, 2).is_contiguous()
    return out.transpose(1, 2), lse


def by_tokens(q, k, v, score, mask):
    given = {"score_mod": score}
    if mask is not None:
        given["mask_mod"] = mask
    return attention(q, k, v, **given, return_lse=True)


def results(call, inputs, *options, twice=False):
    """out and lse; the gradients of their sums, weighted; then those of."""
    table = torch.cos(torch.arange(4 * SEQLEN * 1.0)).reshape(4, -1)
    leaves = [x.detach().requires_grad_() for x in (*inputs, table)]
    bias = leaves[-1]

    def score(s, b, h, i, j):
        return s + bias[h, i]

    found = call(*leaves[:3], score, *options)
    douts = [torch.sin(torch.arange(x.numel() * 1.0)) for x in found]
    douts = [d.reshape(x.shape) for d, x in zip(douts, found, strict=True)]
    gradients = torch.autograd.grad(found, leaves, douts, create_graph=twice)
    if twice:
        squares = sum(x.square().sum() for x in gradients)
        gradients += torch.autograd.grad(squares, leaves)
    return [x.detach() for x in (*found, *gradients)]


# Kernels cannot access rows of 9 numbers in place: they are copied.
@pytest.mark.parametrize(("head_dim", "mask"), [(16, MASK), (9, None)])
def test_results_and_gradients(head_dim, mask):
    sizes = {"seqlen_q": SEQLEN, "seqlen_k": SEQLEN, "batch": 1}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim}
    inputs = tensors(torch.float16, **sizes)
    with emulated_torch.active("sm_90a"):
        expected = results(by_tokens, inputs, mask)
        assert_equal(results(by_heads, inputs, mask), expected)
        got = results(by_heads, inputs, mask, torch.Tensor.contiguous)
        assert_equal(got, expected)


def test_second_derivatives():
    sizes = {"seqlen_q": SEQLEN, "seqlen_k": SEQLEN, "batch": 1}
    inputs = tensors(torch.float32, **sizes)
    with emulated_torch.active("sm_80"):
        got = results(by_heads, inputs, None, twice=True)
        assert_equal(got, results(by_tokens, inputs, None, twice=True))


@pytest.mark.parametrize("empty", ["seqlen_q", "seqlen_k"])
def test_gradients_of_nothing(empty):
    inputs = tensors(torch.float32, requires_grad=True, **{empty: 0})
    given = [x.transpose(1, 2) for x in inputs]
    with emulated_torch.active("sm_80"):
        out = flex_attention(*given, enable_gqa=True)
        gradients = torch.autograd.grad(out.sum(), inputs)
        attention(*tensors(torch.float32))  # a launch
    assert_equal(gradients, [torch.zeros_like(x) for x in inputs])
