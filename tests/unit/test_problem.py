"""The result of validation: the problem, and arrays in full rank."""

import numpy as np
import pytest

from cuflash.errors import DTypeError, ShapeError
from cuflash.request.problem import Problem
from cuflash.request.validate import attention as validate
from cuflash.request.validate import merging

SIZES = dict.fromkeys(
    ["batch", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"], 1
)


def zeros(*shape):
    return np.zeros(shape, np.float16)


def test_a_forward_problem_holds_every_argument():
    call = validate.forward(
        zeros(2, 5, 6, 16),
        zeros(2, 7, 3, 16),
        zeros(2, 7, 3, 8),
        causal=True,
        block_q=np.int64(64),
    )
    assert call.problem == Problem(
        "forward", "float16", 2, 5, 7, 6, 3, 16, 8, 0.25, True, 64, None
    )
    assert type(call.problem.block_q) is int
    assert not call.return_lse and call.out is None


def test_a_backward_problem_holds_every_argument():
    q, k, v = zeros(2, 5, 6, 16), zeros(2, 7, 3, 16), zeros(2, 7, 3, 8)
    out, lse = zeros(2, 5, 6, 8), np.zeros((2, 6, 5), np.float32)
    call = validate.backward(
        out, q, k, v, out, lse, scale=2, block_k=32, deterministic=True
    )
    assert call.problem == Problem(
        "backward", "float16", 2, 5, 7, 6, 3, 16, 8, 2.0, False, None, 32, True
    )


@pytest.mark.parametrize(
    ("rank", "full", "full_lse"),
    [
        (2, (1, 5, 1, 8), (1, 1, 5)),
        (3, (1, 5, 3, 8), (1, 3, 5)),
        (4, (2, 5, 3, 8), (2, 3, 5)),
    ],
)
def test_arrays_are_views_in_full_rank(rank, full, full_lse):
    out = zeros(2, 5, 3, 8)[{2: (0, slice(None), 0), 3: 0, 4: ()}[rank]]
    lse = np.zeros((2, 3, 5), np.float32)[(0,) * (4 - rank)]
    call = merging.merge_states(out_a=out, lse_a=lse, out_b=out, lse_b=lse)
    assert call.rank == rank
    assert call.arrays["out_a"].shape == full
    assert call.arrays["lse_b"].shape == full_lse
    assert np.shares_memory(call.arrays["out_a"], out)
    assert np.shares_memory(call.arrays["lse_b"], lse)


@pytest.mark.parametrize(
    ("num_heads_q", "num_heads_kv", "group_size"),
    [(8, 2, 4), (3, 3, 1), (0, 2, 0), (0, 0, 0)],
)
def test_group_size(num_heads_q, num_heads_kv, group_size):
    problem = Problem(
        "forward",
        "float32",
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        scale=1.0,
        **SIZES,
    )
    assert problem.group_size == group_size


def test_a_call_seen_before_is_checked_again():
    """Cached signatures distinguish 1 from True and 64 from 64.0."""
    q = zeros(5, 16)
    validate.forward(q, q, q, causal=True, block_q=64)
    for wrong in ({"causal": 1}, {"block_q": 64.0}, {"block_q": True}):
        with pytest.raises(DTypeError):
            validate.forward(q, q, q, **wrong)
    with pytest.raises(ShapeError):
        validate.forward(q, q[:, :8], q)
