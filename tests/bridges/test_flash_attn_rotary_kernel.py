"""On a GPU rotations run by a kernel; here on the emulator."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import int32, normal, offsets  # noqa: E402
from torch_data import negated  # noqa: E402

from cuflash.flash_attn import rotation  # noqa: E402
from cuflash.flash_attn.layers.rotary import (  # noqa: E402
    apply_rotary_emb,
    apply_rotary_emb_qkv_,
)
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [pytest.mark.slow, needs_compiler]

CALLS = {
    "offset": {"seqlen_offsets": 2},
    "offsets": {"seqlen_offsets": int32(1, 4)},
    "interleaved": {"interleaved": True},
    "in place": {"inplace": True, "seqlen_offsets": int32(0, 1)},
    "packed": {"cu_seqlens": offsets([2, 3]), "max_seqlen": 3},
}


@pytest.fixture
def by_kernel():
    """Run a call by the kernel, unless it raises."""

    def run(function, *args, **options):
        with emulated_torch.active("sm_90a") as device:
            result = function(*args, **options)
            assert device.launches
            return result

    return run


def tensors(packed, dtype):
    shape = (5, 2, 8) if packed else (2, 5, 2, 8)
    x = normal(*shape, dtype=dtype, grad=True)
    cos, sin = normal(9, 3), normal(9, 3, seed=1)
    return x, cos.to(dtype), sin.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_results_and_gradients(by_kernel, options, dtype):
    x, cos, sin = tensors("cu_seqlens" in options, dtype)

    def run(x):
        out = apply_rotary_emb(x.clone(), cos, sin, **options)
        return out, torch.autograd.grad(out, x, torch.ones_like(out))[0]

    for got, want in zip(by_kernel(run, x), run(x), strict=True):
        # Kernels may fuse a product and a sum: one rounding of float32 less.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=eps, atol=8 * 2.0**-23)


def test_parts_in_place(by_kernel):
    cos, sin = normal(9, 4), normal(9, 4, seed=1)
    got, want = normal(2, 5, 3, 2, 8), normal(2, 5, 3, 2, 8)
    apply_rotary_emb_qkv_(want, cos, sin)
    assert by_kernel(apply_rotary_emb_qkv_, got, cos, sin) is got
    torch.testing.assert_close(got, want, rtol=0, atol=8 * 2.0**-52)


def test_a_change_in_place_is_counted(by_kernel):
    """So that autograd notices it."""
    x = normal(2, 5, 2, 8)
    before = x._version
    by_kernel(rotation.apply_rotary, x, *normal(2, 9, 3), inplace=True)
    assert x._version > before


def test_overlapping_elements_are_refused(by_kernel):
    x = normal(1, 5, 2, 8).expand(2, 5, 2, 8)
    with pytest.raises(ValueError, match="x has elements that share memory"):
        by_kernel(rotation.apply_rotary, x, *normal(2, 9, 3), inplace=True)


def test_tables_that_negate(by_kernel):
    x, cos, sin = tensors(False, torch.float32)
    x = x.detach()
    got = by_kernel(apply_rotary_emb, x, negated(cos), negated(sin))
    assert_arrays_equal(got, by_kernel(apply_rotary_emb, x, cos, sin), "got")
