"""Small random models of Hugging Face Transformers, in float64."""

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import sdpa_mask

import cuflash.torch

NAME, ORACLE = "cu_attention", "oracle"
cuflash.torch.register_transformers(NAME)


def oracle(module, q, k, v, mask, scaling, softcap=None, s_aux=None, **_):
    """Attention with all its weights, in the dtype of its arguments.

    Transformers' own "eager" computes softmax in float32, and "sdpa" knows
    neither softcap nor sinks.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
        scores = scores + mask[..., : k.shape[2]]
    # Of a row without keys, the weights are 0.
    parts = [scores, torch.full_like(scores[..., :1], -1e300)]
    if s_aux is not None:
        parts.append(s_aux.view(1, -1, 1, 1).expand_as(scores[..., :1]))
    weights = torch.cat(parts, -1).softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2), weights


def oracle_mask(*arguments, **more):
    """A tensor for each mask."""
    more |= {
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    return sdpa_mask(*arguments, **more)


AttentionInterface.register(ORACLE, oracle)
AttentionMaskInterface.register(ORACLE, oracle_mask)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}

# Model and configuration.
MODELS = {
    "llama": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**GROUPED, **TOKENS),
    ),
    "mistral": (
        MistralForCausalLM,
        lambda: MistralConfig(**GROUPED, **TOKENS, sliding_window=4),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(
            **GROUPED,
            **TOKENS,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
        ),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **GROUPED,
            **TOKENS,
            sliding_window=4,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
    ),
    "bert": (
        BertModel,
        lambda: BertConfig(**SIZES, type_vocab_size=1, pad_token_id=0),
    ),
}


def model(name, implementation=NAME, dtype=torch.float64, **more):
    """Return a model in evaluation mode, the same weights at each call."""
    kind, config = MODELS[name]
    config = config()
    for key, value in more.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    made = kind._from_config(
        config,
        attn_implementation=implementation,
        experts_implementation="eager",  # in float64 too
    )
    # Weights of size 0.02 would leave all scores near 0.
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made.to(dtype).eval()


def both(name, other=ORACLE, **more):
    """Return the model with cuflash, and the same with the oracle."""
    return model(name, **more), model(name, other, **more)


def tokens(batch=2, seqlen=11):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 61, (batch, seqlen), generator=generator)


def padding(side, batch=2, seqlen=11):
    """Return a mask of tokens: the second sequence has 4 less."""
    mask = torch.ones(batch, seqlen, dtype=torch.int64)
    part = slice(None, 4) if side == "left" else slice(-4, None)
    mask[1, part] = 0
    return mask


def results(model, mask=None, **inputs):
    """Return what tokens lead to, and the gradients of all weights."""
    given = {"input_ids": tokens(), **inputs}
    if mask is not None:
        given["attention_mask"] = mask
    out = model(**given)[0]
    kept = out if mask is None else out[mask.bool()]
    weights = torch.cos(torch.arange(kept.numel())).view(kept.shape)
    model.zero_grad()
    (kept * weights.to(kept.dtype)).sum().backward()
    found = {"out": kept.detach()}
    for name, x in model.named_parameters():
        found[name] = torch.zeros_like(x) if x.grad is None else x.grad
    return found


def assert_close(got, expected):
    """Assert equality but for the order of sums in float64.

    Two layers with some thousand operations each, on numbers up to 100
    times the largest result: 1e4 * 2^-53 * 100 = 1.1e-10 of it.
    """
    assert got.keys() == expected.keys()
    largest = max(x.abs().max() for x in expected.values())
    for name, x in expected.items():
        assert (got[name] - x).abs().max() <= 1.1e-10 * largest, name
