"""Every dtype and head_dim: masked or not, ragged, grouped heads."""

import numpy as np
import pytest

import cuflash
from helpers import calls, expected
from helpers.backends import CupyBackend, on_kernels, on_kernels_of
from helpers.compare import (
    assert_all,
    assert_allclose,
    assert_bitwise,
    assert_forward_matches,
    assert_gradients_match,
)
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import call_double_backward, call_jvp, tangents
from helpers.dtypes import DTYPES

HEAD_DIMS = [1, 7, 32, 40, 64, 80, 96, 128, 160, 192, 256]
# No tile size divides these; under the causal mask the first pair has rows
# that see all of some tiles, the second rows that see nothing.
LENGTHS = [(113, 203), (203, 113)]
LONGEST = {"emulated": 300, "cupy": 1500}
HEADS = {
    "emulated": {},
    "cupy": {"batch": 2, "num_heads_q": 6, "num_heads_kv": 2},
}


def check(backend, case):
    """Compare a whole forward and backward with the reference."""
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


def case_of(backend, dtype, lengths=(113, 203), **changes):
    fields = {**HEADS[backend.name], **changes}
    return Case(dtype, seqlen_q=lengths[0], seqlen_k=lengths[1], **fields)


@on_kernels_of(dtype=DTYPES, head_dim=HEAD_DIMS, causal=[False, True])
def test_head_dims(backend, dtype, head_dim, causal):
    for lengths in LENGTHS:
        case = case_of(
            backend,
            dtype,
            lengths,
            head_dim=head_dim,
            head_dim_v=head_dim,
            causal=causal,
            seed=head_dim,
        )
        check(backend, case)


@on_kernels_of(dtype=DTYPES, head_dims=[(64, 128), (192, 128), (40, 7)])
def test_head_dim_v(backend, dtype, head_dims):
    d, dv = head_dims
    case = case_of(backend, dtype, head_dim=d, head_dim_v=dv, causal=True)
    check(backend, case)


@on_kernels_of(dtype=DTYPES, scale=[-0.3, 0.0, 2.0])
def test_scales(backend, dtype, scale):
    case = case_of(backend, dtype, head_dim=64, head_dim_v=64, scale=scale)
    check(backend, case)


@on_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 1025), (1025, 1), (1000, 1500)]
)
def test_lengths(backend, dtype, lengths, causal):
    """Lengths from one token to many tiles."""
    lengths = (min(n, LONGEST[backend.name]) for n in lengths)
    case = Case(
        dtype, 1, *lengths, 2, 1, head_dim=64, head_dim_v=64, causal=causal
    )
    check(backend, case)


@on_kernels_of(dtype=DTYPES, heads=[(1, 1), (8, 8), (8, 1), (15, 3)])
def test_head_groups(backend, dtype, heads):
    lengths = (50, 70) if backend.name == "emulated" else LENGTHS[0]
    case = case_of(
        backend,
        dtype,
        lengths,
        batch=2,
        head_dim=64,
        head_dim_v=64,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        causal=True,
        deterministic=True,
    )
    check(backend, case)


@on_kernels
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "empty",
    [
        {"batch": 0},
        {"num_heads_q": 0},
        {"num_heads_q": 0, "num_heads_kv": 0},
        {"seqlen_q": 0},
        {"seqlen_k": 0},
        {"seqlen_q": 0, "seqlen_k": 0},
        # Several tiles of keys.
        {"seqlen_q": 0, "seqlen_k": 70, "head_dim": 64},
    ],
    ids=" ".join,
)
def test_empty(backend, arch, dtype, empty):
    fields = {"batch": 2, "num_heads_q": 2, **empty, "on": Emulation(arch)}
    case = Case(dtype, **fields)
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(backend, case, q, k, v)
    assert out.shape == dout.shape
    assert_all(out, 0, "out", case)
    assert lse.shape == (case.batch, case.num_heads_q, case.seqlen_q)
    assert_all(lse, -np.inf, "lse", case)
    grads = calls.backward(backend, case, dout, q, k, v, out, lse)
    for got, like in zip(grads, (q, k, v), strict=True):
        assert got.shape == like.shape
        assert_all(got, 0, "got", case)
    merged, _ = calls.merge_states(backend, case, out, lse, out, lse)
    assert_bitwise(merged, out, "out")


@on_kernels
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "empty",
    [
        {"batch": 0},
        {"num_heads_q": 0},
        {"num_heads_q": 0, "num_heads_kv": 0},
        {"seqlen_q": 0},
    ],
    ids=" ".join,
)
def test_empty_derivatives(backend, arch, dtype, empty):
    fields = {"batch": 2, "num_heads_q": 2, **empty, "on": Emulation(arch)}
    case = Case(dtype, **fields)
    direction = tangents(case, "qkv")
    *_, out_dot, _ = call_jvp(case, direction, backend)
    assert out_dot.shape == inputs(case)[-1].shape
    second = call_double_backward(case, direction, backend)
    for name, like in direction.items():
        assert second[name].shape == like.shape
        assert_all(second[name], 0, name)


@pytest.mark.gpu  # the emulator's grid has no limits
def test_more_blocks_than_a_grid_axis_of_65535():
    """Tiles, heads and batch share a grid axis with a limit of 2^31 - 1."""
    case = Case(
        "bfloat16",
        batch=3,
        seqlen_q=1,
        seqlen_k=2,
        num_heads_q=30000,
        num_heads_kv=30000,
        head_dim=64,
        head_dim_v=64,
    )
    check(CupyBackend(), case)


@on_kernels
def test_calls_match_the_numpy_path(backend):
    """The same call on the same arrays, on both backends."""
    case = case_of(backend, "float64", head_dim=40, head_dim_v=40, causal=True)
    q, k, v, _ = inputs(case)
    here = cuflash.forward(q, k, v, **case.call())
    there, _ = calls.forward(backend, case, q, k, v)
    assert_allclose(there, here, "there", rtol=1e-12, atol=1e-14)
