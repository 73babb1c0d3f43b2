"""Dropout's seed: given, or drawn from torch's generator."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch_data import tensors  # noqa: E402

import cuflash.torch  # noqa: E402

pytestmark = pytest.mark.slow


def dropped(**more):
    return cuflash.torch.attention(*tensors(), dropout=0.5, **more)


def test_a_seed_is_drawn():
    torch.manual_seed(3)
    first, second = dropped(), dropped()
    torch.manual_seed(3)
    assert torch.equal(dropped(), first)
    assert not torch.equal(first, second)


def test_a_given_seed_draws_none():
    state = torch.random.get_rng_state()
    assert torch.equal(dropped(seed=1), dropped(seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_checkpointing_drops_the_same_pairs():
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for again in (False, True):
        torch.manual_seed(5)
        inputs = tensors(requires_grad=True)

        def call(q, k, v):
            return cuflash.torch.attention(q, k, v, dropout=0.5)

        out = (
            checkpoint(call, *inputs, use_reentrant=False)
            if again
            else call(*inputs)
        )
        gradients.append(torch.autograd.grad(out.sum(), inputs))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
