"""A model that imports flash_attn gets cuflash's functions."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

pytestmark = pytest.mark.slow

ALIAS = """
import sys
import cuflash.flash_attn

sys.modules["flash_attn"] = cuflash.flash_attn
"""
MODEL = """
import flash_attn
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary

assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 8, 0)
q = torch.ones(1, 3, 2, 8, requires_grad=True)
flash_attn_func(q, q, q, causal=True).sum().backward()
print(q.grad.shape)
"""


def run(text):
    """Run Python text in a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_that_imports_flash_attn():
    assert run(ALIAS + MODEL) == "torch.Size([1, 3, 2, 8])"


def test_importing_cuflash_imports_no_bridge():
    names = run("import cuflash, sys; print(*sys.modules)").split()
    assert not {"torch", "cuflash.flash_attn"} & {*names}
