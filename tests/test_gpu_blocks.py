"""block_q and block_k: what can be run is right, what cannot is listed."""

import re

import pytest

import cuflash
from cuflash import ValueRangeError
from helpers import calls, expected
from helpers.backends import CupyBackend
from helpers.compare import assert_gradients_match, assert_matches
from helpers.data import Case, inputs

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
SIZES = (16, 32, 64, 128)


def case_of(dtype, block_q, block_k, head_dim=64):
    return Case(
        dtype,
        seqlen_q=300,
        seqlen_k=333,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=True,
        block_q=block_q,
        block_k=block_k,
    )


def listed(error):
    """Read the pairs that an error says can be run."""
    pairs = str(error).partition("can: ")[2]
    return {tuple(map(int, p)) for p in re.findall(r"\((\d+), (\d+)\)", pairs)}


@pytest.mark.parametrize("block_k", SIZES)
@pytest.mark.parametrize("block_q", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_runs_or_refuses(dtype, block_q, block_k):
    case = case_of(dtype, block_q, block_k)
    q, k, v, _ = inputs(case)
    try:
        out, _ = calls.forward(GPU, case, q, k, v)
    except ValueRangeError as error:
        assert listed(error) and (block_q, block_k) not in listed(error)
    else:
        want, _ = expected.forward(q, k, v, **case.meaning())
        assert_matches(out, want, "out", case)


@pytest.mark.parametrize("block_k", SIZES)
@pytest.mark.parametrize("block_q", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_backward_runs_or_refuses(dtype, block_q, block_k):
    q, k, v, dout = inputs(case_of(dtype, None, None))
    out, lse = calls.forward(GPU, case_of(dtype, None, None), q, k, v)
    case = case_of(dtype, block_q, block_k)
    try:
        grads = calls.backward(GPU, case, dout, q, k, v, out, lse)
    except ValueRangeError as error:
        assert listed(error) and (block_q, block_k) not in listed(error)
    else:
        want = expected.backward(dout, q, k, v, **case.meaning())
        assert_gradients_match(grads, want, case)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_the_error_lists_can_be_run(dtype, head_dim):
    """The first and the last pair of the list, one call each."""
    case = case_of(dtype, 7, 7, head_dim)
    q, k, v, _ = inputs(case)
    with pytest.raises(ValueRangeError, match="block_q 7") as raised:
        calls.forward(GPU, case, q, k, v)
    pairs = sorted(listed(raised.value))
    for pair in (pairs[0], pairs[-1]):
        case = case_of(dtype, *pair, head_dim)
        out, _ = calls.forward(GPU, case, q, k, v)
        want, _ = expected.forward(q, k, v, **case.meaning())
        assert_matches(out, want, "out", case)


def test_refused_blocks_write_nothing(cp):
    q, k, v, _ = (GPU.place(x) for x in inputs(Case("float16")))
    out = cp.full_like(q, 5)
    with pytest.raises(ValueRangeError):
        cuflash.forward(q, k, v, block_q=7, out=out)
    assert (out == 5).all()
