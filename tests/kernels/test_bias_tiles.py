"""float32 biases that wait in shared memory: whole tiles and others."""

import numpy as np
import pytest

import cuflash
from cuflash.plans.tiles import Tile
from helpers.backends import EMULATED
from helpers.compare import assert_bitwise
from helpers.data import Case, Emulation, inputs

FORWARD = Tile(64, 64, 4, ptxas_level=3)
BACKWARD = Tile(
    64, 64, 4, 2, score_warps_q=2, gradient_warps_k=4, ptxas_level=3
)
ON = Emulation("sm_90a", forward_tile=FORWARD, backward_tile=BACKWARD)


def results(backend, case, arrays, bias):
    """out, lse and the gradients, dbias last."""
    q, k, v, dout, bias = (backend.place(x) for x in (*arrays, bias))
    with backend.running(case):
        out, lse = cuflash.forward(q, k, v, bias=bias, return_lse=True)
        got = cuflash.backward(
            dout, q, k, v, out, lse, bias=bias, return_dbias=True,
            deterministic=True,
        )  # fmt: skip
    return [backend.fetch(x) for x in (out, lse, *got)]


def coded(*shape):
    """Multiples of 1/8 up to 16, each row and column with other ones."""
    return (np.arange(np.prod(shape)) * 37 % 257).reshape(shape) / 16 - 8.0


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize("tokens", [127, 128])
def test_whole_tiles_and_elements_are_the_same(backend, tokens):
    """128 tokens: aligned rows by 16 bytes, the others by element."""
    case = Case("float32", 1, tokens, tokens, 2, 2, 64, 64, on=ON)
    bias = coded(1, 2, tokens, tokens).astype(np.float32)
    padded = np.zeros((1, 2, tokens, tokens + 1), np.float32)
    padded[..., :-1] = bias
    want = results(backend, case, inputs(case), bias)
    for other in (padded[..., :-1], bias.swapaxes(2, 3).copy().swapaxes(2, 3)):
        for name, got, same in zip(
            ("out", "lse", "dq", "dk", "dv", "dbias"),
            results(backend, case, inputs(case), other), want, strict=True,
        ):  # fmt: skip
            assert_bitwise(got, same, name)


@pytest.mark.parametrize("backend", [EMULATED])
def test_a_large_number_in_all_biases_changes_nothing(backend):
    """Its rests, in backward, are those of each row.

    With q = 0 scores are biases. P = exp2(x) then loses 2^-22 by exp2, 2^-20
    by rounding x, at most 24, and, near 0, as much by that of lse: 2^-18 in
    all. So do out, delta, and dS, of terms dout * v.
    """
    case = Case("float32", 1, 65, 65, 2, 2, 64, 64, on=ON)
    q, k, v, dout = inputs(case)
    arrays = np.zeros_like(q), k, v, dout
    bias = coded(1, 2, 65, 65).astype(np.float32)
    *_, near = results(backend, case, arrays, bias)
    *_, far = results(backend, case, arrays, bias + np.float32(8192))
    terms = np.einsum("bqhd,bkhd->bhqk", np.abs(dout), np.abs(v))
    assert np.abs(far - near).max() < 2.0**-17 * terms.max()
