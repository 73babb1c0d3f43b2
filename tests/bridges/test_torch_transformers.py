"""Hugging Face models with cuflash: logits and gradients of their own."""

import sys

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
    results,
    tokens,
)

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash.torch import transformers as bridge  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # It renames arguments.
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

by_model = pytest.mark.parametrize("name", MODELS)
decoders = pytest.mark.parametrize("name", [x for x in MODELS if x != "bert"])


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of attention."""
    found = []

    def attention(*inputs, **options):
        found.append({n: x for n, x in options.items() if x is not None})
        return cuflash.torch.attention(*inputs, **options)

    monkeypatch.setattr(bridge, "attention", attention)
    return found


@by_model
def test_logits_and_gradients(name, calls):
    ours, theirs = both(name)
    assert_close(results(ours), results(theirs))
    if name not in ("gemma2", "gpt_oss"):  # which SDPA does not know
        assert_close(results(model(name, "sdpa")), results(theirs))
    assert len(calls) == 2
    assert not any({"mask", "bias"} & call.keys() for call in calls)


@pytest.mark.parametrize("side", ["left", "right"])
@by_model
def test_padding(name, side, calls):
    ours, theirs = both(name)
    mask = padding(side)
    assert_close(results(ours, mask), results(theirs, mask))
    for call in calls:
        assert "segment_ids_k" in call and "mask" not in call


@by_model
def test_a_mask_of_all_tokens_is_none(name, calls):
    ours, theirs = both(name)
    mask = torch.ones(2, 11, dtype=torch.int64)
    assert_close(results(ours, mask), results(theirs, mask))
    assert not any("segment_ids_k" in call for call in calls)


def test_windows_are_options(calls):
    results(model("mistral"))
    assert [call["window"] for call in calls] == [(3, None)] * 2


PACKED = {
    "input_ids": tokens(1, 11),
    "position_ids": torch.tensor([[*range(5), *range(6)]]),
    "use_cache": False,
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_by_positions(name, calls):
    """Of which GPT-OSS takes no notice."""
    ours, theirs = both(name)
    assert_close(results(ours, **PACKED), results(theirs, **PACKED))
    assert all("segment_ids_q" in call for call in calls)


@decoders
def test_packed_by_lengths(name, calls):
    ends = torch.tensor([0, 5, 11])
    lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 6,
        "max_length_k": 6,
    }
    ours, theirs = both(name)
    got = results(ours, **PACKED, **lengths)
    assert all(call["max_seqlen_k"] == 6 for call in calls)
    apart = [theirs(x)[0] for x in tokens(1, 11).split([5, 6], dim=1)]
    assert_close({"out": got["out"]}, {"out": torch.cat(apart, 1).detach()})


@decoders
def test_mask_of_pairs(name):
    """As a user gives it, with four axes."""
    ours, theirs = both(name)
    mask = torch.zeros(2, 1, 11, 11, dtype=torch.float64)
    mask.masked_fill_(torch.ones(11, 11).triu(1).bool(), -1e30)
    got = results(ours, attention_mask=mask)
    assert_close(got, results(theirs, attention_mask=mask))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@decoders
def test_generate(name, cache):
    ours, theirs = both(name)
    inputs = {
        "input_ids": tokens(),
        "attention_mask": padding("left"),
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    assert_arrays_equal(
        ours.generate(**inputs),
        theirs.generate(**inputs),
        "ours.generate(**inputs)",
    )


@decoders
def test_a_second_prompt_after_a_cache(name):
    """Of fewer tokens than a window, whose first keys are in the cache."""
    ours, theirs = both(name)
    found = []
    for one in (ours, theirs):
        with torch.no_grad():
            first = one(tokens()[:, :8], use_cache=True)
            found.append(
                one(tokens()[:, 8:], past_key_values=first.past_key_values)
            )
    assert_close({"out": found[0][0]}, {"out": found[1][0]})


def test_dropout_in_training():
    ours = model("llama", attention_dropout=0.5).train()
    torch.manual_seed(0)
    first, second = results(ours), results(ours)
    torch.manual_seed(0)
    assert_arrays_equal(results(ours)["out"], first["out"], "results")
    assert not torch.equal(first["out"], second["out"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    ours = model("llama").train()
    expected = results(ours, padding("left"))
    ours.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    assert_close(results(ours, padding("left")), expected)


@pytest.mark.parametrize("mask", [None, padding("left")])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_compiled_models(name, mask):
    torch._dynamo.reset()
    ours = model(name)
    expected = results(ours, mask)
    ours.compile(backend="aot_eager", fullgraph=True)
    assert_close(results(ours, mask), expected)


def test_paged_caches_are_refused():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(cuflash.UnsupportedError, match="continuous batching"):
        bridge.attention_function(
            torch.nn.Module(), q, q, q, None, block_table=torch.zeros(1)
        )


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers>=5"):
        cuflash.torch.register_transformers()


def test_an_old_transformers(monkeypatch):
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size: None)
    with pytest.raises(ImportError, match="an older one"):
        cuflash.torch.register_transformers()


def test_a_name_with_flash_is_refused():
    with pytest.raises(cuflash.ValueRangeError, match="without 'flash'"):
        cuflash.torch.register_transformers("cuflash")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_errors_are_those_of_the_dtype(name, dtype):
    """At most twice as far from float64 as SDPA is: CONTRIBUTING, "Error"."""
    mask = padding("left")
    low = {NAME: {}, "sdpa": {}}
    for implementation in low:
        one = model(name, implementation, dtype)
        low[implementation] = results(one, mask)
    exact = results(model(name, "sdpa", dtype).double(), mask)
    for key, expected in exact.items():
        ours, theirs = (
            (low[x][key].double() - expected).norm() for x in (NAME, "sdpa")
        )
        ulps = 4 * torch.finfo(dtype).eps * expected.norm()
        assert ours <= 2 * theirs + ulps, key


def test_packed_sequences_with_padding_become_a_tensor():
    from transformers import masking_utils as theirs

    from cuflash.torch import masks

    ids = torch.tensor([[0, 0, 1, 1, 1]])
    function = theirs.and_masks(
        theirs.causal_mask_function, theirs.packed_sequence_mask_function(ids)
    )
    given = {
        "batch_size": 1,
        "q_length": 5,
        "kv_length": 5,
        "mask_function": function,
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1]]).bool(),
    }
    want = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
    got = masks.make(**given)
    assert isinstance(got, torch.Tensor)
    assert_arrays_equal(got, want, "got")
