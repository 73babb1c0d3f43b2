"""forward_kvcache with values that are the keys' first columns."""

from dataclasses import replace

import pytest

from helpers import kvcache_calls as kv
from helpers.backends import BACKENDS
from helpers.kvcache_calls import KVCase

on_backends = pytest.mark.parametrize("backend", BACKENDS)

CASE = KVCase(
    "bfloat16", (0, 7, 130), seqlen_new=3, seqlen_q=3, head_dim=72,
    head_dim_v=40, page_size=16, latent="yes", causal=True, seed=1,
)  # fmt: skip
CONTIGUOUS = replace(CASE, page_size=None, spare=2)


@on_backends
@pytest.mark.parametrize("latent", ["yes", "view"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_values_are_columns_of_keys(backend, latent, page_size):
    """New tokens are keys alone."""
    kv.check(backend, replace(CASE, latent=latent, page_size=page_size))


@on_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims(backend, dtype):
    """Those of DeepSeek's models."""
    kv.check(backend, replace(
        CONTIGUOUS, dtype=dtype, head_dim=576, head_dim_v=512, num_heads_kv=1,
        group_size=16,
    ))  # fmt: skip


@on_backends
@pytest.mark.parametrize("scales", ["head", "page"])
def test_scales_are_those_of_keys(backend, scales):
    kv.check(backend, replace(CASE, scales=scales))


@on_backends
def test_rotated_keys_are_values_too(backend):
    kv.check(backend, replace(CASE, rotary_dim=32))
