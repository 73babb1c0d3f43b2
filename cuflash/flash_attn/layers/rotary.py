"""Rotary position embedding, under the name of flash-attn's module."""

from cuflash.flash_attn.layers.embedding import RotaryEmbedding
from cuflash.flash_attn.layers.functions import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]

apply_rotary_emb_func = apply_rotary_emb
