"""Bad input: each message names the argument and what to do."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from flash_attn_data import int32, normal, offsets, qkv  # noqa: E402

from cuflash import flash_attn  # noqa: E402
from cuflash.errors import (  # noqa: E402
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
from helpers.compare import assert_arrays_equal  # noqa: E402

pytestmark = pytest.mark.slow

Q, K, V = qkv(3, 4)
META = torch.zeros(2, dtype=torch.int32, device="meta")
FUNC = [
    ({"dropout_p": 0.1, "return_attn_probs": True}, UnsupportedError,
     "return_attn_probs is given with dropout_p 0.1, expected dropout_p 0"),
    ({"q_descale": Q}, UnsupportedError, "float8 queries are not supported"),
    ({"attention_chunk": 4}, UnsupportedError,
     "attention_chunk of flash_attn_func is given, expected 0: chunked"),
    ({"window": 4}, TypeError,
     "flash_attn_func() got an unexpected keyword argument 'window'"),
    ({"window_size": 4}, DTypeError,
     "window_size is 4 of type int, expected (left, right)"),
    ({"window_size": (1.5, 0)}, DTypeError,
     "window_size has a bound 1.5 of type float, expected an int, or -1"),
    ({"window_size": META}, DTypeError,
     "window_size is a tensor on meta, expected two ints or a CPU tensor"),
    ({"softmax_scale": META[0]}, DTypeError,
     "softmax_scale is a tensor on meta, expected a number"),
    ({"dropout_p": 1.5}, ValueRangeError, "dropout_p is 1.5, expected at lea"),
    ({"softmax_scale": True}, DTypeError,
     "FlashAttention-3 has another order of arguments"),
    ({"softmax_scale": "2"}, DTypeError, "softmax_scale is '2' of type str"),
    ({"causal": 1}, DTypeError, "causal is 1 of type int, expected True or"),
    ({"alibi_slopes": normal(4).half()}, DTypeError,
     "alibi_slopes has dtype float16, expected float32 or float64"),
    ({"alibi_slopes": torch.ones(4).requires_grad_()}, UnsupportedError,
     "alibi_slopes requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), FUNC)
def test_flash_attn_func(options, error, text):
    grad = Q.clone().requires_grad_()
    with pytest.raises(error, match=re.escape(text)):
        flash_attn.flash_attn_func(grad, K, V, **options)


@pytest.mark.parametrize("name", ["pack_gqa", "sm_margin"])
def test_keywords_without_effect(name):
    want = flash_attn.flash_attn_func(Q, K, V)
    got = flash_attn.flash_attn_func(Q, K, V, **{name: 1}, attention_chunk=0)
    assert_arrays_equal(got, want, "got")


MEANT = [
    ("is_causal", ": write causal"),
    ("mask", ": cuflash.torch.attention"),
    ("zzz", ""),
]


@pytest.mark.parametrize(("name", "cure"), MEANT)
def test_keywords_of_others_name_the_cure(name, cure):
    words = f"flash_attn_func() got an unexpected keyword argument {name!r}"
    with pytest.raises(TypeError, match=re.escape(words + cure)):
        flash_attn.flash_attn_func(Q, K, V, **{name: None})


TENSORS = [
    ("flash_attn_func", (Q[0], K, V), ShapeError,
     "q has shape (3, 4, 8), expected 4 axes: (batch, seqlen, nheads, head"),
    ("flash_attn_func", (Q, K, np.ones(3)), DTypeError,
     "v is of type numpy.ndarray, expected a torch.Tensor (pass torch.from_d"),
    ("flash_attn_func", (Q.flatten(2), K, V), ShapeError,
     "(batch, seqlen, nheads, headdim); pass q.unflatten(-1, (nheads, headd"),
    ("flash_attn_kvpacked_func", (Q, normal(2, 4, 3, 2, 8)), ShapeError,
     "kv has shape (2, 4, 3, 2, 8), expected 2 along axis 2: (batch, seqlen,"),
    ("flash_attn_qkvpacked_func", (Q,), ShapeError,
     "qkv has shape (2, 3, 4, 8), expected 5 axes: (batch, seqlen, 3, nheads"),
    ("flash_attn_varlen_func", (Q[0], K[0], V[0], None, None, 3, 4),
     DTypeError, "cu_seqlens_q is None, expected a tensor of integers"),
    ("flash_attn_varlen_func", (Q, K, V, int32(0), int32(0), 3, 4),
     ShapeError, "q has shape (2, 3, 4, 8), expected 3 axes: (total, nheads"),
    ("flash_attn_with_kvcache", (Q, K[0], V), ShapeError,
     "k_cache has shape (4, 2, 8), expected 4 axes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensors", "error", "text"), TENSORS)
def test_tensors(name, tensors, error, text):
    with pytest.raises(error, match=re.escape(text)):
        getattr(flash_attn, name)(*tensors)


def test_used_keys_of_another_batch():
    tables = (offsets([3]), offsets([4]), 3, 4)
    text = "seqused_k has shape (2,), expected (1,): one for each sequence"
    with pytest.raises(ShapeError, match=re.escape(text)):
        flash_attn.flash_attn_varlen_func(
            Q[0], K[0], V[0], *tables, seqused_k=int32(1, 1)
        )


def test_heads_that_do_not_add_up():
    text = "qkv has 4 heads and num_heads_q is 3, expected num_heads_q + 2 *"
    with pytest.raises(ShapeError, match=re.escape(text)):
        flash_attn.flash_attn_qkvpacked_func(Q, num_heads_q=3)


CACHE = [
    ({"k": K}, ValueRangeError, "k is given without v, expected v too"),
    ({"v": V}, ValueRangeError, "v is given without k, expected k too"),
    ({"k": K, "v": V}, ValueRangeError,
     "k is given without cache_seqlens, expected cache_seqlens too"),
    ({"rotary_cos": normal(4, 2), "rotary_sin": normal(4, 2)},
     ValueRangeError, "rotary_cos is given without k, expected k and v too"),
    ({"rotary_seqlens": int32(1, 1)}, UnsupportedError, "rotate q and k with"),
    ({"block_table": int32(1), "page_table": int32(1)}, ValueRangeError,
     "block_table and page_table are both given, expected one of them"),
    ({"cu_seqlens_q": offsets([1]), "cu_seqlens_k_new": offsets([1])},
     UnsupportedError, "cu_seqlens_k_new is not the tensor cu_seqlens_q"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), CACHE)
def test_flash_attn_with_kvcache(options, error, text):
    caches = torch.zeros(2, 2, 6, 2, 8, dtype=torch.float64)
    with pytest.raises(error, match=re.escape(text)):
        flash_attn.flash_attn_with_kvcache(Q, *caches, **options)


COS = normal(4, 2)
ROTARY = [
    ({"cos": COS[0]}, ShapeError, "cos has shape (2,), expected 2 axes"),
    ({"sin": COS[1:]}, ShapeError, "sin has shape (3, 2), expected (4, 2)"),
    ({"cos": normal(4, 5), "sin": normal(4, 5)}, ShapeError,
     "cos has shape (4, 5), expected at most 4 columns"),
    ({"cos": COS.long()}, DTypeError, "cos has dtype torch.int64, expected"),
    ({"sin": COS.clone().requires_grad_()}, UnsupportedError,
     "sin requires grad, but only x has a gradient"),
    ({"seqlen_offsets": 2}, ValueRangeError,
     "seqlen_offsets is 2 and x has 3 tokens, expected at most 4 in sum"),
    ({"seqlen_offsets": int32(1)}, ShapeError,
     "seqlen_offsets has shape (1,), expected (2,): one for each sequence"),
    ({"x": Q[0], "cu_seqlens": offsets([3])}, ValueRangeError,
     "cu_seqlens is given without max_seqlen"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), ROTARY)
def test_apply_rotary_emb(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        apply_rotary_emb(**{"x": Q, "cos": COS, "sin": COS, **options})
