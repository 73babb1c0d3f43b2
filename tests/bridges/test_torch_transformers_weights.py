"""Hugging Face models with cuflash: output_attentions=True."""

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")
pytest.importorskip("transformers", reason="tests of its models need it")

from hf_models import (  # noqa: E402
    MODELS,
    NAME,
    assert_close,
    both,
    model,
    padding,
    tokens,
)

import cuflash  # noqa: E402
from cuflash.torch import returned_weights  # noqa: E402
from cuflash.torch import transformers as bridge  # noqa: E402
from helpers.compare import (  # noqa: E402
    assert_all,
    assert_allclose,
    assert_arrays_equal,
)

pytestmark = pytest.mark.slow


def attentions(model, **inputs):
    """Return the weights of each layer, by name."""
    given = {"input_ids": tokens(), **inputs}
    found = model(**given, output_attentions=True).attentions
    return {f"layer {i}": x for i, x in enumerate(found)}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_each_layer(name, side):
    mask = None if side is None else padding(side)
    ours, theirs = (attentions(x, attention_mask=mask) for x in both(name))
    assert len(ours) == 2
    if side is not None:  # what a padding query sees is left open
        seen = mask.bool()[:, None, :, None]
        ours = {n: torch.where(seen, x, 0) for n, x in ours.items()}
        theirs = {n: torch.where(seen, x, 0) for n, x in theirs.items()}
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_they_are_those_of_eager(name, dtype):
    """As near to the weights in float64 as eager's own, twice as far.

    And two roundings of weights of at most 1 to the dtype.
    """
    tiny = torch.finfo(dtype).eps
    exact = attentions(model(name, "oracle"))
    eager, ours = (attentions(model(name, x, dtype)) for x in ("eager", NAME))
    for layer, x in ours.items():
        assert x.dtype is dtype
        low = (eager[layer] - exact[layer]).abs().max()
        assert (x - exact[layer]).abs().max() <= 2 * low + tiny, layer


def test_losses_of_weights_train():
    ours, theirs = both("llama")
    found = []
    for each in (ours, theirs):
        loss = sum(x.square().sum() for x in attentions(each).values())
        loss.backward()
        found.append({
            n: torch.zeros_like(x) if x.grad is None else x.grad
            for n, x in each.named_parameters()
        })  # fmt: skip
    assert_close(*found)


def test_weights_by_a_static_cache_have_its_width():
    made = model("llama")
    with torch.no_grad():
        out = made.generate(
            tokens(), max_new_tokens=2, do_sample=False, pad_token_id=0,
            cache_implementation="static", output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    first = out.attentions[0][0]
    width = tokens().shape[1]
    assert first.shape[-1] >= width
    sums = first.sum(-1)
    # Of at most 32 float32 weights, each within some units of 2^-24.
    assert_allclose(sums, torch.ones_like(sums), "sums", atol=2.0**-19)
    assert_all(first[..., width:], 0, "weights of places without tokens")


def test_a_bias_that_is_trained():
    """Weights of a model with position biases have their gradients."""
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    bias = torch.randn(2, 3, 3, dtype=torch.float64).requires_grad_()

    def weights(bias):
        module = torch.nn.Module()
        return bridge.attention_function(
            module, q, q, q, None, is_causal=False, position_bias=bias,
            output_attentions=True,
        )[1]  # fmt: skip

    scores = q @ q.mT * q.shape[-1] ** -0.5 + bias
    expected = torch.softmax(scores, -1)
    (dbias,) = torch.autograd.grad(expected.square().sum(), bias)
    (got,) = torch.autograd.grad(weights(bias).square().sum(), bias)
    # float64: some units of 2^-53 an operation, of numbers near 1.
    assert_allclose(got, dbias, "dbias", atol=2.0**-46)


def test_weights_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(returned_weights, "MOST_BYTES", 2 * 4 * 11 * 11 * 8)
    made = model("llama")
    assert len(attentions(made)) == 2
    words = "cuflash.torch.weights for chosen queries, weight_sums for"
    with pytest.raises(cuflash.UnsupportedError, match=words):
        attentions(made, input_ids=tokens(seqlen=12))


def test_no_weights_unless_asked_for():
    made = model("bert")
    found = made(input_ids=tokens())
    assert found.attentions is None
    more = made(input_ids=tokens(), output_attentions=True)
    assert_arrays_equal(found[0], more[0], "out")
