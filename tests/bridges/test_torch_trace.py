"""torch.jit.trace: it records operators, and no results as constants."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import options, tensors  # noqa: E402

import cuflash.flash_attn as flash_attn  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.flash_attn.layers import rotary  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

# TracerWarnings are errors, as all warnings are.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # deprecated
]

OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
TABLE = torch.linspace(-1, 1, 36, dtype=torch.float64).view(9, 4)
PACKED = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
USED = torch.tensor([1, 2], dtype=torch.int32)


def caches(q, k, v):
    return cuflash.torch.forward_kvcache(
        q, k.detach().clone(), v.detach().clone(), k_new=k, v_new=v,
        cache_seqlens=0,
    )  # fmt: skip


def attention(**given):
    return lambda *inputs: cuflash.torch.attention(*inputs, **given)


def varlen(q, k, v):
    return flash_attn.flash_attn_varlen_func(
        q[0], k[0], v[0], OFFSETS, OFFSETS, 3, 3, seqused_k=USED
    )


def rotation(**given):
    return lambda q, *_: rotary.apply_rotary_emb(q, TABLE, TABLE, **given)


CALLS = {
    **{name: attention(**given) for name, given in options().items()},
    "packed": lambda *x: attention(**PACKED)(*(y[0] for y in x)),
    "caches": caches,
    "varlen": varlen,
    "rotation": rotation(),
    "positions": rotation(seqlen_offsets=USED),
    "stacked": lambda q, *_: flash_attn.flash_attn_qkvpacked_func(
        torch.stack([q, q, q], 2)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_trace_computes_anew(name):
    inputs, call = tensors(), CALLS[name]
    traced = torch.jit.trace(call, inputs)
    other = tensors(seed=1, requires_grad=True)
    assert_arrays_equal(traced(*other), call(*other), "traced(*other)")


@pytest.mark.parametrize("function", [attention(), rotation()])
def test_a_trace_takes_other_sizes(function):
    traced = torch.jit.trace(function, tensors())
    other = tensors(seqlen_q=3, seqlen_k=3)
    assert_arrays_equal(traced(*other), function(*other), "traced(*other)")


def test_a_trace_draws_a_seed_at_each_call():
    def call(*inputs):
        return cuflash.torch.attention(*inputs, dropout=0.5)

    traced = torch.jit.trace(call, tensors(), check_trace=False)
    first, second = (traced(*tensors()) for _ in range(2))
    assert not torch.equal(first, second)
