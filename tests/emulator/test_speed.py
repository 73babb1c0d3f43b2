"""The emulator's run time, in seconds of one core.

CPU time of this process and its children, independent of other load.
"""

import os

import numpy as np
import pytest

import cuflash
from cuflash.backends.emulator import runtime
from helpers.compare import assert_bitwise
from helpers.data import Case, inputs
from helpers.host_compiler import needs_compiler
from helpers.kernels import kernels, small_kernel

pytestmark = needs_compiler

CASE = Case(
    "float16",
    seqlen_q=256,
    seqlen_k=256,
    head_dim=64,
    head_dim_v=64,
    causal=True,
)


def seconds(call, *arguments, **options):
    """Return what a call takes, and what it returns."""
    before = os.times()
    result = call(*arguments, **options)
    after = os.times()
    return sum(after[:4]) - sum(before[:4]), result


def test_forward_and_backward():
    q, k, v, dout = inputs(CASE)
    with cuflash.emulator.active("sm_80"):
        for _ in range(2):  # the first time compiles
            forward, (out, lse) = seconds(
                cuflash.forward, q, k, v, causal=True, return_lse=True
            )
            backward, _ = seconds(
                cuflash.backward, dout, q, k, v, out, lse, causal=True
            )
    assert forward <= 0.5
    assert backward <= 1.5


def test_decode():
    """Four sequences of one query and 300 keys."""
    q, k, v, _ = inputs(
        Case("float16", 4, 1, 300, 8, 2, head_dim=64, head_dim_v=64, seed=1)
    )
    lengths = np.full(4, 300, np.int32)
    with cuflash.emulator.active("sm_80"):
        for _ in range(2):  # the first time compiles
            forward, out = seconds(cuflash.forward, q, k, v, num_splits=2)
            kvcache, same = seconds(
                cuflash.forward_kvcache, q, k, v, cache_seqlens=lengths,
                num_splits=2,
            )  # fmt: skip
    assert_bitwise(same, out, "out")
    assert forward <= 1
    assert kvcache <= 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiling_a_kernel(monkeypatch, tmp_path, direction):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    # First one that is small: with it comes the engine, which all share.
    runtime.executable(small_kernel(), "sm_80")
    for kernel in kernels(direction, "float16", "sm_80", 256):
        taken, _ = seconds(runtime.executable, kernel, "sm_80")
        assert taken <= 10, kernel.entry
