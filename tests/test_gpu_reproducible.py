"""The same bits every time: out, lse, dk, dv; dq if deterministic.

CUFLASH_REPEATS sets how often (200).
"""

import os

import pytest

import cuflash
from helpers.backends import CupyBackend
from helpers.data import Case, inputs

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
REPEATS = int(os.environ.get("CUFLASH_REPEATS", "200"))
# Long enough that blocks on all multiprocessors race for the same dq.
LENGTH = 1500


def placed(dtype, head_dim):
    case = Case(dtype, 2, LENGTH, LENGTH, 8, 4, head_dim, head_dim)
    return [GPU.place(x) for x in inputs(case)]


def count_changes(cp, compute, repeats=REPEATS):
    """Count the repeats of which any bit differs from the first run's."""
    first = [bits(x) for x in compute()]
    changed = cp.zeros(len(first), cp.int64)
    for _ in range(repeats):
        GPU.poison()
        for i, (a, b) in enumerate(zip(compute(), first, strict=True)):
            changed[i] += (bits(a) != b).any()
    return changed.tolist()


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_forward(cp, dtype, head_dim, causal):
    q, k, v, _ = placed(dtype, head_dim)

    def compute():
        return cuflash.forward(q, k, v, causal=causal, return_lse=True)

    repeats = REPEATS if dtype != "float32" else REPEATS // 10
    assert count_changes(cp, compute, repeats) == [0, 0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_backward(cp, dtype, head_dim, causal, deterministic):
    q, k, v, dout = placed(dtype, head_dim)
    out, lse = cuflash.forward(q, k, v, causal=causal, return_lse=True)

    def compute():
        dq, dk, dv = cuflash.backward(
            dout, q, k, v, out, lse,
            causal=causal, deterministic=deterministic,
        )  # fmt: skip
        return (dk, dv, dq) if deterministic else (dk, dv)

    repeats = REPEATS if dtype != "float32" else REPEATS // 10
    assert not any(count_changes(cp, compute, repeats))
