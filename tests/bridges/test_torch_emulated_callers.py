"""Callers of attention on an emulated device: transforms, models, ranks."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

import sdpa_data  # noqa: E402
from torch.func import vmap  # noqa: E402
from torch_data import tensors  # noqa: E402
from torch_transforms import (  # noqa: E402
    FIRST,
    SECOND,
    assert_close,
    both,
    derivative,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash import distributed  # noqa: E402
from cuflash.torch.dtypes import from_numpy, to_numpy  # noqa: E402
from helpers import emulated_torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402
from helpers.host_compiler import needs_compiler  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode
    # Transformers renames arguments.
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def device():
    with emulated_torch.active("sm_80") as device:
        yield device
        assert device.launches


@pytest.mark.parametrize("transform", FIRST)
def test_first_derivatives(transform):
    assert_derivatives(transform, *both("bias of each"))


@pytest.mark.parametrize("transform", SECOND)
def test_second_derivatives(transform):
    """Of q alone: each element of each result is a row of the batch."""
    assert_derivatives(transform, *both("none", batch=1), num=1)


def assert_derivatives(transform, ours, theirs, inputs, num=None):
    got, expected = (
        derivative(transform, function, num or len(inputs), *inputs)
        for function in (ours, theirs)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_vmap(transform):
    ours, theirs, inputs = both("bias of each", batch=1)
    mapped = [torch.stack([x, x.sin()], 1) for x in inputs]
    got, expected = (
        vmap(partial(derivative, transform, f, len(inputs)), in_dims=1)(
            *mapped
        )
        for f in (ours, theirs)
    )
    assert_close(got, expected)


def test_mapped_gradients():
    """is_grads_batched: as gradients of each."""
    inputs = tensors(torch.float32, requires_grad=True)
    out = cuflash.torch.attention(*inputs)
    douts = torch.stack([torch.ones_like(out), out.detach()])
    pull = partial(torch.autograd.grad, out, inputs, retain_graph=True)
    got = pull(douts, is_grads_batched=True)
    for x, *each in zip(got, *map(pull, douts), strict=True):
        assert_arrays_equal(x, torch.stack(each), "x")


MASKS = {
    "none": None,
    "bool": sdpa_data.normal(2, 1, 5, 7, seed=4) > -0.5,
    "float": sdpa_data.normal(4, 1, 7, seed=4),
}


@pytest.mark.parametrize("attn_mask", MASKS.values(), ids=MASKS)
def test_torchs_signature(attn_mask):
    given = sdpa_data.inputs(2, 4, heads_kv=2)
    options = {"attn_mask": attn_mask, "enable_gqa": True}
    ours = cuflash.torch.scaled_dot_product_attention
    got, want = (
        sdpa_data.results(function, given, **options)
        for function in (ours, sdpa_data.math)
    )
    of_out, of_gradients = sdpa_data.bounds(*given, attn_mask)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        limit = of_gradients if i else of_out
        torch.testing.assert_close(x, y, rtol=0, atol=limit)


@pytest.mark.parametrize(
    "name, side", [("gemma2", None), ("gpt_oss", None), ("llama", "left")]
)
def test_models(name, side):
    pytest.importorskip("transformers", reason="tests of its models need it")
    import hf_models

    ours, theirs = hf_models.both(name)
    mask = side and hf_models.padding(side)
    hf_models.assert_close(
        hf_models.results(ours, mask), hf_models.results(theirs, mask)
    )


def test_ranks(device):
    """Ranks' arrays are on torch's stream, and share tensors' memory."""
    whole = tensors(seqlen_q=16, seqlen_k=16, requires_grad=True)
    out = cuflash.torch.attention(*whole, causal=True)
    expected = [out, *torch.autograd.grad(out.square().sum(), whole)]

    def of_rank(group):
        parts = [
            from_numpy(distributed.shard(to_numpy(x), group.rank, 2))
            for x in whole
        ]
        parts = [x.requires_grad_() for x in parts]
        out = cuflash.torch.distributed_attention(
            *parts, group=group, causal=True
        )
        return out, *torch.autograd.grad(out.square().sum(), parts)

    each = distributed.run_threads(2, of_rank)
    stream = ("stream", None, emulated_torch.STREAM)
    assert device.fake.logged("stream") == [stream] * 4
    for i, want in enumerate(expected):
        got = distributed.unshard([to_numpy(x[i]) for x in each])
        # A few hundred roundings of values of about 1, and of gradients of 4.
        bound = 1000 * torch.finfo(torch.float64).eps
        torch.testing.assert_close(from_numpy(got), want, rtol=0, atol=bound)
