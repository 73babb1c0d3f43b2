"""flash_attn_func against a dense float64 oracle."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import assert_close, normal, qkv, slopes  # noqa: E402
from flash_attn_oracle import (  # noqa: E402
    UNIT,
    dense,
    tolerance,
    tolerance_of_gradients,
)

from cuflash.flash_attn import flash_attn_func  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

LONGEST = 9  # tokens: slopes of at most 1 add at most that
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.7},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (3, 2)},
    "softcap": {"softcap": 1.5},
    "slopes": {"alibi_slopes": slopes(4)},
    "slopes, causal": {"alibi_slopes": slopes(4), "causal": True},
    "slopes of each sequence": {"alibi_slopes": slopes(2, 4)},
    "all": {
        "alibi_slopes": slopes(2, 4),
        "window_size": (4, 2),
        "softcap": 2.0,
        "softmax_scale": 0.5,
    },
}


@pytest.mark.parametrize("seqlens", [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_out_and_lse(options, seqlens):
    q, k, v = qkv(*seqlens)
    out, lse = flash_attn_func(q, k, v, **options, return_softmax_lse=True)
    want_out, want_lse = dense(q, k, v, **options)
    assert_close(out, want_out, tolerance(q, k, v, LONGEST))
    assert_close(lse, want_lse, tolerance(q, k, v, LONGEST))


@pytest.mark.parametrize("seqlens", [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options, seqlens):
    inputs = qkv(*seqlens, grad=True)
    out, want = flash_attn_func(*inputs, **options), dense(*inputs, **options)
    dout = normal(*out.shape, seed=5)
    got = torch.autograd.grad(out, inputs, dout)
    expected = torch.autograd.grad(want[0], inputs, dout)
    atol = tolerance_of_gradients(*inputs, dout, LONGEST)
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, atol)


def test_gradients_of_lse():
    """flash-attn returns none: its lse is a constant to autograd."""
    inputs = qkv(4, 9, grad=True)
    results = flash_attn_func(*inputs, causal=True, return_attn_probs=True)
    cotangents = [normal(*x.shape, seed=5) for x in results[:2]]
    got = torch.autograd.grad(results[:2], inputs, cotangents)
    want = torch.autograd.grad(dense(*inputs, causal=True), inputs, cotangents)
    atol = tolerance_of_gradients(*inputs, cotangents[0])
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, atol)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_heads_of_a_group_share_a_key_head(heads_k):
    q, k, v = qkv(5, 6, heads_k=heads_k)
    want, _ = dense(q, k, v, causal=True)
    got = flash_attn_func(q, k, v, causal=True)
    assert_close(got, want, tolerance(q, k, v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_dtypes_are_rounded_once(dtype):
    """On the CPU arithmetic is float32's: of unit 2^-24, not 2^-53."""
    dtype = getattr(torch, dtype)
    q, k, v = qkv(5, 6, dtype=dtype)
    got = flash_attn_func(q, k, v, causal=True)
    want, _ = dense(q, k, v, causal=True)
    half_ulp = torch.finfo(dtype).eps / 2 * float(want.abs().max())
    assert got.dtype == dtype
    assert_close(got, want, half_ulp + 2.0**29 * tolerance(q, k, v))


def test_gradcheck():
    q, k, v = qkv(3, 4, heads=2, heads_k=1, head_dim=4, batch=1, grad=True)

    def run(*inputs):
        return flash_attn_func(
            *inputs, causal=True, softcap=2.0, deterministic=True
        )

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_dropout_keeps_the_mean_and_follows_the_seed():
    """v is 1, so out is the sum of the kept weights over 1 - p.

    Uniform weights 1 / n: the mean of N = 2 * 64 * 4 rows has the variance
    p / (1 - p) / (n N); 6 deviations.
    """
    q = torch.zeros(2, 64, 4, 8)
    v = torch.ones(2, 64, 4, 8)

    def run(seed):
        torch.manual_seed(seed)
        return flash_attn_func(q, q, v, dropout_p=0.25)

    first, again, other = run(0), run(0), run(1)
    assert_arrays_equal(first, again, "first")
    assert not torch.equal(first, other)
    deviation = (0.25 / 0.75 / (64 * 2 * 64 * 4)) ** 0.5
    rounding = 64 * UNIT  # of a float64 sum; out is rounded to float32
    assert abs(first[..., 0].double().mean() - 1) < 6 * deviation + rounding
