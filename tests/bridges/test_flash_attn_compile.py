"""Models that are compiled: the whole call is one graph."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import normal, offsets  # noqa: E402

from cuflash import flash_attn  # noqa: E402
from cuflash.flash_attn.layers import rotary  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

COS, SIN = normal(6, 4), normal(6, 4, seed=1)
CU_SEQLENS = offsets([2, 4])
CALLS = {
    "dense": lambda x: flash_attn.flash_attn_qkvpacked_func(
        x, causal=True, window_size=(2, -1), softcap=3.0
    ),
    "varlen": lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(
        x.flatten(0, 1), CU_SEQLENS, 4, causal=True
    ),
    "rotation": lambda x: rotary.apply_rotary_emb(x[:, :, 0], COS, SIN),
    "rotation in place": lambda x: rotary.apply_rotary_emb(
        x[:, :, 0].clone(), COS, SIN, inplace=True
    ),
    "rotation of qkv": lambda x: rotary.apply_rotary_emb_qkv_(
        x.clone(), COS, SIN, interleaved=True
    ),
    "rotation of kv": lambda x: rotary.apply_rotary_emb_kv_(
        x[:, :, 1:].clone(), COS, SIN
    ),
}


@pytest.mark.parametrize("run", CALLS.values(), ids=CALLS)
def test_results_and_gradients_of_a_compiled_call(run):
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = normal(2, 3, 3, 4, 8, grad=True)
    got, want = compiled(x), run(x)
    assert_arrays_equal(got, want, "got")
    dout = normal(*want.shape, seed=2)
    gradients = [torch.autograd.grad(y, x, dout)[0] for y in (got, want)]
    assert_arrays_equal(*gradients, "gradient")
