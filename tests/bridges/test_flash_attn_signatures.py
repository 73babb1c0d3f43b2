"""Names, order and defaults of parameters are flash-attn 2.8's."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from cuflash import flash_attn  # noqa: E402
from cuflash.flash_attn import (  # noqa: E402
    bert_padding,
    flash_attn_interface,
)
from cuflash.flash_attn.layers import rotary  # noqa: E402
from cuflash.flash_attn.ops.triton.rotary import apply_rotary  # noqa: E402

pytestmark = pytest.mark.slow

COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ATTENTION = {
    "flash_attn_func": (("q", "k", "v"), COMMON),
    "flash_attn_kvpacked_func": (("q", "kv"), COMMON),
    "flash_attn_qkvpacked_func": (("qkv",), COMMON),
    "flash_attn_varlen_func": (
        ("q", "k", "v", *OFFSETS),
        {**COMMON, "block_table": None},
    ),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *OFFSETS), COMMON),
    "flash_attn_varlen_qkvpacked_func": (
        ("qkv", "cu_seqlens", "max_seqlen"),
        COMMON,
    ),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}
OTHERS = {
    bert_padding.unpad_input: (
        ("hidden_states", "attention_mask"),
        {"unused_mask": None},
    ),
    bert_padding.unpad_input_for_concatenated_sequences: (
        ("hidden_states", "attention_mask_in_length"),
        {},
    ),
    bert_padding.pad_input: (
        ("hidden_states", "indices", "batch", "seqlen"),
        {},
    ),
    rotary.apply_rotary_emb: (
        ("x", "cos", "sin"),
        {
            "interleaved": False,
            "inplace": False,
            "seqlen_offsets": 0,
            "cu_seqlens": None,
            "max_seqlen": None,
        },
    ),
    apply_rotary: (
        ("x", "cos", "sin"),
        {
            "seqlen_offsets": 0,
            "cu_seqlens": None,
            "max_seqlen": None,
            "interleaved": False,
            "inplace": False,
            "conjugate": False,
        },
    ),
    rotary.apply_rotary_emb_qkv_: (
        ("qkv", "cos", "sin"),
        {
            "cos_k": None,
            "sin_k": None,
            "interleaved": False,
            "seqlen_offsets": 0,
            "num_heads_q": None,
        },
    ),
    rotary.apply_rotary_emb_kv_: (
        ("kv", "cos", "sin"),
        {"interleaved": False, "seqlen_offsets": 0},
    ),
    rotary.RotaryEmbedding: (
        ("dim",),
        {
            "base": 10000.0,
            "interleaved": False,
            "scale_base": None,
            "device": None,
        },
    ),
    rotary.RotaryEmbedding.forward: (
        ("self", "qkv"),
        {
            "kv": None,
            "seqlen_offset": 0,
            "max_seqlen": None,
            "num_heads_q": None,
        },
    ),
}


def signature(function):
    """The names without a default, and the others with theirs, in order."""
    parameters = inspect.signature(function).parameters.values()
    named = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    required = tuple(x.name for x in named if x.default is x.empty)
    others = [(x.name, x.default) for x in named if x.default is not x.empty]
    return required, others


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    required, defaults = ATTENTION[name]
    function = getattr(flash_attn, name)
    assert signature(function) == (required, [*defaults.items()])
    assert getattr(flash_attn_interface, name) is function


@pytest.mark.parametrize("function", OTHERS, ids=lambda x: x.__qualname__)
def test_padding_and_rotation(function):
    required, defaults = OTHERS[function]
    assert signature(function) == (required, [*defaults.items()])


def test_all_functions_are_listed():
    functions = {x for x in flash_attn.__all__ if x != "__version__"}
    assert functions == {*ATTENTION} == {*flash_attn_interface.__all__}
