"""forward against the float64 reference, for any shape."""

import numpy as np

import cuflash
import strategies
from cuflash.plans.tiles import Tile
from helpers import calls, expected
from helpers.compare import assert_bitwise, assert_forward_matches
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES, lse_dtype

EXAMPLES = [
    # The stride of a single token's axis led to addresses that are not
    # aligned, at which nothing was read.
    Case("float16", seqlen_q=1, seqlen_k=1, head_dim=1),
    # Rare combinations on Hopper: grouped heads, several tiles per block,
    # pipelines that wrap around, a padded and a second panel, tiles partly or
    # fully masked, scales of 0 and below.
    Case(
        "float16", 2, 200, 190, 4, 2, 72, 40, causal=True, scale=-0.3,
        on=Emulation("sm_90a", num_sms=1),
    ),
    Case(
        "bfloat16", 1, 300, 20, 2, 2, 16, 80, causal=True, scale=0.0,
        on=Emulation("sm_90a", num_sms=2),
    ),
    Case(
        "bfloat16", 1, 130, 450, head_dim=96, head_dim_v=128,
        on=Emulation("sm_90a", forward_tile=Tile(128, 64, 12, num_stages=2)),
    ),
    Case(
        "float16", 1, 400, 420, 2, 1, 40, 64, causal=True, scale=-1.0,
        on=Emulation(
            "sm_90a", seed=1, num_sms=3,
            forward_tile=Tile(192, 80, 16, num_stages=2),
        ),
    ),
    # One stage for Q.
    Case(
        "bfloat16", 1, 330, 310, 2, 1, 160, 200, causal=True,
        on=Emulation("sm_90a", num_sms=1),
    ),
]  # fmt: skip


@on_each_backend(
    strategies.cases, each={"dtype": DTYPES}, wide=True, examples=EXAMPLES
)
def test_is_attention(backend, case):
    q, k, v, _ = inputs(case)
    got = calls.forward(backend, case, q, k, v)
    want = expected.forward(q, k, v, sums=case.sums(), **case.meaning())
    assert_forward_matches(got, want, case)


@on_each_backend(strategies.cases, longest=70, archs=strategies.FAMILIES)
def test_results_are_arrays_of_the_same_kind(backend, case):
    q, k, v, _ = (backend.place(x) for x in inputs(case))
    with backend.running(case):
        out, lse = cuflash.forward(q, k, v, **case.call(), return_lse=True)
    assert type(out) is type(lse) is backend.array_type
    assert out.dtype == q.dtype and lse.dtype == lse_dtype(q.dtype)


@on_each_backend(strategies.cases, longest=70, archs=strategies.FAMILIES)
def test_out_argument_gets_the_same_bits(backend, case):
    q, k, v, dout = (backend.place(x) for x in inputs(case))
    target = dout
    target[...] = np.nan
    with backend.running(case):
        plain = cuflash.forward(q, k, v, **case.call())
        result = cuflash.forward(q, k, v, **case.call(), out=target)
    assert result is target
    assert_bitwise(backend.fetch(target), backend.fetch(plain), "out")


@on_each_backend(strategies.cases, longest=70, archs=strategies.FAMILIES)
def test_ranks_agree(backend, case):
    """2-D and 3-D inputs give the 4-D call's result without axes of one."""
    q, k, v, _ = (x[:1, :, :1] for x in inputs(case))
    out, lse = calls.forward(backend, case, q, k, v)
    out3, lse3 = calls.forward(backend, case, q[0], k[0], v[0])
    out2, lse2 = calls.forward(backend, case, *(x[0, :, 0] for x in (q, k, v)))
    assert_bitwise(out3, out[0], "3-D out")
    assert_bitwise(lse3, lse[0], "3-D lse")
    assert_bitwise(out2, out[0, :, 0], "2-D out")
    assert_bitwise(lse2, lse[0, 0], "2-D lse")
