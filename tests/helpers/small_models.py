"""Every type of model of Hugging Face Transformers, built small."""

import copy
import functools

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

TEXT = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
TYPES = {*TEXT, *modeling_auto.MODEL_MAPPING_NAMES} & {*CONFIG_MAPPING}
TYPES = sorted(TYPES - {"fastspeech2_conformer", "vits"})  # they speak

# Larger ones take seconds, and do not become small by the names below.
MOST_PARAMETERS = 2e7

# A score of 30, the sum of 64 products: each is rounded by at most 2^-24 of
# it, and so, relative to it, is exp(score).
ROUNDING = 30 * 64 * 2**-24

# What a configuration has of these is set.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    "word_embed_proj_dim": 32,
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_hidden_size", "d_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 60),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    "local_attention": 8,
    # Mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "index_topk"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "embedding_size"), 16),
    "first_k_dense_replace": 1,
    # Latent and sparse attention, state spaces, ...
    **dict.fromkeys(("qk_rope_head_dim", "laurel_rank"), 4),
    **dict.fromkeys(
        ("index_n_heads", "o_groups", "o_lora_rank", "hc_mult"), 2
    ),
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), 2),
    "index_local_blocks": 1,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_n_heads", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_expand", "type_vocab_size"), 2),
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    # Images
    **dict.fromkeys(("image_size", "decoder_hidden_size"), 16),
    "patch_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(kind, **more):
    """Return the configuration of a type of model, small."""
    config = CONFIG_MAPPING[kind]
    usual = config().to_dict()
    found = {name: x for name, x in SIZES.items() if name in usual}
    heads = usual.get("num_attention_heads")
    if heads and usual.get("num_key_value_heads") == heads:
        found["num_key_value_heads"] = 4  # some cannot share keys
    return config(**{**found, **more})


def small_model(kind, implementation, config=None):
    """Return a model with weights large enough for softmax to have peaks."""
    maker = AutoModelForCausalLM if kind in TEXT else AutoModel
    config = copy.deepcopy(config or small_config(kind))
    torch.manual_seed(0)
    made = maker.from_config(
        config,
        attn_implementation=implementation,
        experts_implementation="eager",  # in float64 too
    )
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return made.float().eval()


def is_small(kind, config):
    maker = AutoModelForCausalLM if kind in TEXT else AutoModel
    with torch.device("meta"):
        made = maker.from_config(copy.deepcopy(config))
    return sum(x.numel() for x in made.parameters()) <= MOST_PARAMETERS


@functools.cache
def tokens(seqlen, batch=2):
    generator = torch.Generator().manual_seed(seqlen)
    return torch.randint(3, 59, (batch, seqlen), generator=generator)


def padding(side, seqlen, batch=2):
    """Return a mask of tokens; the first sequence has 3 less."""
    mask = torch.ones(batch, seqlen, dtype=torch.int64)
    part = slice(None, 3) if side == "left" else slice(-3, None)
    if side != "full":
        mask[0, part] = 0
    return mask


def results(model, seqlen, side):
    """Return the logits, or hidden states, of what is no padding."""
    given = {"input_ids": tokens(seqlen)}
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        generator = torch.Generator().manual_seed(0)
        shape = (2, model.config.num_channels, size, size)
        pixels = torch.randn(shape, generator=generator)
        given = {"pixel_values": pixels.to(model.dtype)}
    elif side != "full":
        given["attention_mask"] = padding(side, seqlen)
    if model.config.is_encoder_decoder and "input_ids" in given:
        given["decoder_input_ids"] = tokens(5)
    with torch.no_grad():
        found = _first(model(**given))
    if "attention_mask" not in given or model.config.is_encoder_decoder:
        return found
    return found[given["attention_mask"].bool()]


def cached_results(model, seqlen, side, first):
    """Return the logits of the last tokens, after a cache of `first`."""
    ids, mask = tokens(seqlen), padding(side, seqlen)
    with torch.no_grad():
        cached = model(
            input_ids=ids[:, :first],
            attention_mask=mask[:, :first],
            use_cache=True,
        )
        cache = {
            name: getattr(cached, name)
            for name in ("past_key_values", "cache")
            if getattr(cached, name, None) is not None
        }
        found = model(input_ids=ids[:, first:], attention_mask=mask, **cache)
    return _first(found)


def _first(found):
    logits = getattr(found, "logits", None)
    return found.last_hidden_state if logits is None else logits


def difference(got, expected):
    """Return the largest difference, relative to the largest element."""
    assert got.shape == expected.shape
    if not got.numel():
        return 0.0
    return ((got - expected).abs().max() / expected.abs().max()).item()
