"""Functions of stacked tensors equal those of separate ones, bit for bit."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import normal, offsets  # noqa: E402

from cuflash import flash_attn  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

OPTIONS = {"causal": True, "softcap": 3.0, "window_size": (4, -1)}
SEQLENS = (3, 5, 2)


def assert_same(run, apart, stacked, axis):
    """Compare out and gradients of run(*stacked) and run(*apart)."""
    results = [run(*x) for x in (stacked, apart)]
    assert_arrays_equal(*results, "out")
    dout = normal(*results[0].shape, seed=5)
    got, want = (
        torch.autograd.grad(out, x, dout)
        for out, x in zip(results, (stacked, apart), strict=True)
    )
    first = len(stacked) - 1  # those that are separate in both
    assert all(map(torch.equal, got[:first], want[:first]))
    assert_arrays_equal(
        got[first], torch.stack(want[first:], axis), "got[first]"
    )


def function(of_one, of_two, of_three, *more):
    """A function that chooses by the number of its tensors."""
    by_number = {1: of_one, 2: of_two, 3: of_three}

    def run(*tensors):
        chosen = by_number[len(tensors)]
        given = (
            more[:1] if len(tensors) == 1 else [x for x in more for _ in "qk"]
        )
        given = [*given, *([] if len(tensors) > 1 or not more else more[1:])]
        return chosen(*tensors, *given, **OPTIONS)

    return run


DENSE = function(
    flash_attn.flash_attn_qkvpacked_func,
    flash_attn.flash_attn_kvpacked_func,
    flash_attn.flash_attn_func,
)
VARLEN = function(
    flash_attn.flash_attn_varlen_qkvpacked_func,
    flash_attn.flash_attn_varlen_kvpacked_func,
    flash_attn.flash_attn_varlen_func,
    offsets(SEQLENS),
    max(SEQLENS),
)


@pytest.mark.parametrize(
    ("run", "tokens"), [(DENSE, (2, 5)), (VARLEN, (sum(SEQLENS),))]
)
def test_qkv_in_one_tensor(run, tokens):
    axis = len(tokens)
    qkv = normal(*tokens, 3, 4, 8, grad=True)
    apart = [x.detach().requires_grad_() for x in qkv.unbind(axis)]
    assert_same(run, apart, [qkv], axis)


@pytest.mark.parametrize(
    ("run", "tokens"), [(DENSE, (2, 5)), (VARLEN, (sum(SEQLENS),))]
)
def test_kv_in_one_tensor(run, tokens):
    axis = len(tokens)
    q, kv = normal(*tokens, 4, 8, grad=True), normal(*tokens, 2, 2, 8, seed=1)
    kv.requires_grad_()
    apart = [q, *(x.detach().requires_grad_() for x in kv.unbind(axis))]
    assert_same(run, apart, [q, kv], axis)


def test_qkv_as_heads():
    """FlashAttention-3: queries' heads, then keys', then values'."""
    qkv = normal(2, 5, 4 + 2 * 2, 8)
    got = flash_attn.flash_attn_qkvpacked_func(qkv, num_heads_q=4)
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    assert_arrays_equal(got, flash_attn.flash_attn_func(q, k, v), "got")
