"""block_q and block_k: supported sizes work, errors list them."""

import re

import numpy as np
import pytest

import cuflash
from cuflash import ValueRangeError
from helpers import calls, expected
from helpers.backends import EMULATED, on_kernels
from helpers.checks import check_forward, check_gradients
from helpers.compare import assert_all, assert_gradients_match, assert_matches
from helpers.data import SIMT, Case, inputs

SIZES = (16, 32, 64, 128)
LENGTHS = {"emulated": (140, 150), "cupy": (300, 333)}


def case_of(backend, dtype, block_q, block_k, head_dim=64):
    seqlen_q, seqlen_k = LENGTHS[backend.name]
    return Case(
        dtype,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=True,
        block_q=block_q,
        block_k=block_k,
    )


def listed(error):
    """Return the pairs that an error message lists."""
    pairs = str(error).partition("can: ")[2]
    return {tuple(map(int, p)) for p in re.findall(r"\((\d+), (\d+)\)", pairs)}


@on_kernels
@pytest.mark.parametrize("block_k", SIZES)
@pytest.mark.parametrize("block_q", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_runs_or_refuses(backend, dtype, block_q, block_k):
    case = case_of(backend, dtype, block_q, block_k)
    q, k, v, _ = inputs(case)
    try:
        out, _ = calls.forward(backend, case, q, k, v)
    except ValueRangeError as error:
        assert listed(error) and (block_q, block_k) not in listed(error)
    else:
        want, _ = expected.forward(q, k, v, **case.meaning())
        assert_matches(out, want, "out", case)


@on_kernels
@pytest.mark.parametrize("block_k", SIZES)
@pytest.mark.parametrize("block_q", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_backward_runs_or_refuses(backend, dtype, block_q, block_k):
    case = case_of(backend, dtype, block_q, block_k)
    q, k, v, dout = inputs(case)
    try:
        grads = calls.gradients(backend, case, q, k, v, dout)
    except ValueRangeError as error:
        assert listed(error) and (block_q, block_k) not in listed(error)
    else:
        want = expected.backward(dout, q, k, v, **case.meaning())
        assert_gradients_match(grads, want, case)


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_blocks_that_the_error_lists_run(backend, dtype, head_dim):
    """The first and the last pair of the list, one call each."""
    case = case_of(backend, dtype, 7, 7, head_dim)
    q, k, v, _ = inputs(case)
    with pytest.raises(ValueRangeError, match="block_q 7") as raised:
        calls.forward(backend, case, q, k, v)
    pairs = sorted(listed(raised.value))
    for pair in (pairs[0], pairs[-1]):
        case = case_of(backend, dtype, *pair, head_dim)
        out, _ = calls.forward(backend, case, q, k, v)
        want, _ = expected.forward(q, k, v, **case.meaning())
        assert_matches(out, want, "out", case)


@on_kernels
def test_refused_blocks_write_nothing(backend):
    case = Case("float16")
    q, k, v, _ = (backend.place(x) for x in inputs(case))
    out = backend.place(np.full((1, 16, 1, 16), 5, np.float16))
    with backend.running(case), pytest.raises(ValueRangeError):
        cuflash.forward(q, k, v, block_q=7, out=out)
    assert_all(backend.fetch(out), 5, "out", case)


@on_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16", "block_k": 128},
        {"dtype": "float32", "precision": "tf32x3", "block_q": 128},
    ],
    ids=str,
)
def test_dropout_in_large_blocks(backend, changes):
    """A lane with 32 keys, a warp with 32 rows."""
    check_forward(backend, Case(
        seqlen_q=40, seqlen_k=140, dropout=0.25, **changes
    ))  # fmt: skip


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 16), (16, 4)])
def test_fewer_numbers_in_a_row_than_threads(backend, block_q, block_k):
    """simt kernels: nothing past the row's end is read."""
    case = Case(
        "float32", seqlen_q=20, seqlen_k=24, causal=True,
        block_q=block_q, block_k=block_k, on=SIMT,
    )  # fmt: skip
    check_forward(backend, case)
    check_gradients(backend, case)
