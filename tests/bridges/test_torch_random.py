"""Dropout's seed: given, or drawn from torch's generator."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_data import assert_equal, tensors  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow


def dropped(**more):
    return cuflash.torch.attention(*tensors(), dropout=0.5, **more)


def test_a_seed_is_drawn():
    torch.manual_seed(3)
    first, second = dropped(), dropped()
    torch.manual_seed(3)
    assert_arrays_equal(dropped(), first, "dropped()")
    assert not torch.equal(first, second)


def test_a_given_seed_draws_none():
    state = torch.random.get_rng_state()
    assert_arrays_equal(dropped(seed=1), dropped(seed=1), "dropped(seed=1)")
    assert_arrays_equal(torch.random.get_rng_state(), state, "state")


def test_checkpointing_drops_the_same_pairs():
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
        assert_arrays_equal(plain, recomputed, "plain")


# Compiled calls ----------------------------------------------------------


def layers(x):
    for _ in range(3):
        x = x + cuflash.torch.attention(x.sin(), x.cos(), x, dropout=0.5)
    return x


def checkpointed(x):
    return checkpoint(layers, x, use_reentrant=False)


def results(function):
    """Return out and the gradient of its squares, from one state."""
    torch.manual_seed(3)
    x = tensors()[0].requires_grad_()
    out = function(x)
    return out, *torch.autograd.grad(out.square().sum(), x)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("function", [layers, checkpointed])
@pytest.mark.parametrize("budget", [1.0, 0.5, 1e-6])
def test_compiled_layers_drop_other_pairs_each(function, budget):
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget):
        got = results(compiled(function))
    assert_equal(got, results(layers))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor
def test_a_checkpoint_compiled_by_inductor():
    _, k, v = tensors()

    def layer(x):
        return cuflash.torch.attention(x, k, v, dropout=0.5)

    def again(x):
        return checkpoint(layer, x, use_reentrant=False)

    assert_equal(results(compiled(again, "inductor")), results(layer))


def test_a_seed_that_torch_would_draw_again_is_refused():
    from torch._functorch import config

    with pytest.raises(cuflash.UnsupportedError, match='backend="eager"'):
        results(compiled(checkpointed, "eager"))
    with config.patch(activation_memory_budget=0.0):
        with pytest.raises(Exception, match="budget is 0, expected seed too"):
            results(compiled(layers))
