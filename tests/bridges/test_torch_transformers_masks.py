"""Models whose masks are more than patterns: eager's logits."""

import logging

import pytest

torch = pytest.importorskip("torch", reason="tests of cuflash.torch need it")
pytest.importorskip("transformers", reason="tests of its models need it")

from hf_models import NAME  # noqa: E402
from transformers import (  # noqa: E402
    CONFIG_MAPPING,
    T5GemmaConfig,
    T5GemmaModuleConfig,
)

from cuflash.torch import eager_models  # noqa: E402
from helpers.small_models import (  # noqa: E402
    ROUNDING,
    SIZES,
    cached_results,
    difference,
    results,
    small_config,
    small_model,
)

# Of its own code: it renames arguments, and asks for kernels.
pytestmark = pytest.mark.filterwarnings("ignore")


def t5gemma():
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "sliding_window", "pad_token_id")
    part = {name: SIZES[name] for name in names}
    part["layer_types"] = ["sliding_attention", "full_attention"]
    return T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**part),
        decoder=T5GemmaModuleConfig(**part),
        vocab_size=60,
    )


def deepseek_v4():
    return small_config(
        "deepseek_v4",
        head_dim=16,
        num_key_value_heads=1,
        layer_types=[
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates={
            "compressed_sparse_attention": 2,
            "heavily_compressed_attention": 4,
        },
    )


# Configurations; a type stands for its own.
CONFIGS = {"t5gemma": t5gemma, "deepseek_v4": deepseek_v4}
DECODERS = [
    *("bloom", "mpt", "xglm", "gpt_neox_japanese"),  # add masks themselves
    *("deepseek_v32", "glm_moe_dsa", "hy_v4"),  # indices
    "minimax_m3_vl_text",  # block_indices
    "deepseek_v4",  # compressed keys
    "inkling2_text",  # sinks of queries
]
OTHERS = ["t5gemma", "splinter", "pegasus_x", "megatron-bert"]
WINDOW = SIZES["sliding_window"]


def both(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"only newer versions of Transformers have {kind}")
    config = CONFIGS.get(kind, lambda: small_config(kind))()
    return [small_model(kind, x, config) for x in (NAME, "eager")]


@pytest.mark.parametrize("kind", DECODERS + OTHERS)
def test_lengths_around_the_window(kind):
    models = both(kind)
    for side in ("full", "left", "right"):
        for seqlen in range(WINDOW - 1, WINDOW + 3):
            got, expected = (results(x, seqlen, side) for x in models)
            assert difference(got, expected) <= ROUNDING, (side, seqlen)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_second_call_after_a_cache(kind):
    models = both(kind)
    for side in ("full", "left"):
        for seqlen, first in ((9, 8), (WINDOW + 1, WINDOW), (12, 7)):
            got, expected = (
                cached_results(x, seqlen, side, first) for x in models
            )
            assert difference(got, expected) <= ROUNDING, (side, seqlen)


@pytest.mark.parametrize(
    ("kind", "adds"),
    [("bloom", True), ("t5gemma", False), ("exaone", False)],  # it is Llama
)
def test_who_adds_masks_is_told_from_the_configuration(kind, adds):
    model = both(kind)[0]
    assert eager_models.adds_masks(type(model.config)) is adds


def test_the_configuration_of_an_encoder():
    config = both("t5gemma")[0].config
    assert not eager_models.adds_masks(type(config.encoder))


def test_a_configuration_of_no_model_may_add_masks():
    config = type("Config", (), {"__module__": "nowhere.configuration"})()
    assert eager_models.adds_masks(type(config))


def test_a_model_that_never_calls_cuflash_says_so(caplog):
    logger = logging.getLogger("cuflash.torch")
    logger.propagate = True
    logger.warning_once.cache_clear()
    model = both("bloom")[0]
    results(model, 5, "full")
    assert "BloomConfig" in caplog.text and "not called" in caplog.text
