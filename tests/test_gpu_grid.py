"""Every dtype and head_dim on the GPU, masked or not, ragged and grouped."""

import pytest

import cuflash
from helpers import calls, expected
from helpers.backends import CupyBackend
from helpers.compare import assert_forward_matches, assert_gradients_match
from helpers.data import Case, inputs
from helpers.dtypes import DTYPES

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
HEAD_DIMS = [1, 7, 32, 40, 64, 80, 96, 128, 160, 192, 256]
# No tile size divides these; under the causal mask the first pair has rows
# that see all of some tiles, the second rows that see nothing.
LENGTHS = [(113, 203), (203, 113)]

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
causal_or_not = pytest.mark.parametrize("causal", [False, True])


def check(case, **options):
    """Compare a whole forward and backward with the reference."""
    q, k, v, dout = inputs(case)
    out, lse = calls.forward(GPU, case, q, k, v)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches((out, lse), want, case)
    grads = calls.backward(GPU, case, dout, q, k, v, out, lse, **options)
    want = expected.backward(dout, q, k, v, **case.meaning())
    assert_gradients_match(grads, want, case)


def case_of(dtype, lengths=(113, 203), **changes):
    fields = {"batch": 2, "num_heads_q": 6, "num_heads_kv": 2, **changes}
    return Case(dtype, seqlen_q=lengths[0], seqlen_k=lengths[1], **fields)


@causal_or_not
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@each_dtype
def test_head_dims(dtype, head_dim, causal):
    for lengths in LENGTHS:
        check(
            case_of(
                dtype,
                lengths,
                head_dim=head_dim,
                head_dim_v=head_dim,
                causal=causal,
                seed=head_dim,
            )
        )


@pytest.mark.parametrize("head_dims", [(64, 128), (192, 128), (40, 7)])
@each_dtype
def test_head_dim_v(dtype, head_dims):
    d, dv = head_dims
    check(case_of(dtype, head_dim=d, head_dim_v=dv, causal=True))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@each_dtype
def test_scales(dtype, scale):
    check(case_of(dtype, head_dim=64, head_dim_v=64, scale=scale))


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 1025), (1025, 1), (1000, 1500)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@causal_or_not
def test_lengths(dtype, lengths, causal):
    """From one token to many tiles."""
    check(
        Case(dtype, 1, *lengths, 2, 1, head_dim=64, head_dim_v=64,
             causal=causal)
    )  # fmt: skip


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (15, 3)])
@each_dtype
def test_head_groups(dtype, heads):
    q_heads, kv_heads = heads
    check(
        case_of(
            dtype,
            head_dim=64,
            head_dim_v=64,
            num_heads_q=q_heads,
            num_heads_kv=kv_heads,
            causal=True,
        ),
        deterministic=True,
    )


def test_more_blocks_than_a_grid_axis_of_65535():
    """Tiles, heads and batch are one axis of the grid, which has 2^31 - 1."""
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
    check(case)


def test_calls_give_what_the_numpy_path_gives(cp):
    """The same call on the same arrays, there and here."""
    q, k, v, _ = inputs(case_of("float64", head_dim=40, head_dim_v=40))
    here = cuflash.forward(q, k, v, causal=True)
    there = cuflash.forward(*(cp.asarray(x) for x in (q, k, v)), causal=True)
    cp.testing.assert_allclose(there, here, rtol=1e-12, atol=1e-14)
