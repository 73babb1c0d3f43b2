"""double_backward of plain 16-bit calls on Hopper: sm90/double_backward.cu."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash.plans import sm90_double_backward
from cuflash.plans.kernel import Launch
from cuflash.plans.plan import device_of_arch, plan
from helpers.apart import Apart
from helpers.backends import on_kernels
from helpers.checks import check_double_backward
from helpers.compare import (
    assert_bitwise,
)
from helpers.data import Case, Emulation, inputs
from helpers.derivatives import (
    NUMPY,
    assert_near,
    call_double_backward,
    tangents,
)
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=5)
PLAIN = Case("bfloat16", 1, 150, 200, 2, 1, 64, 64, layout="unlike", on=ON)


def check(case, direction, backend):
    got, wanted = check_double_backward(backend, case, direction)
    assert_near(got, {name: x.ref for name, x in wanted.items()}, case)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_plain_calls_have_a_kernel_of_their_own(head_dim):
    problem = small_problem("double_backward", "bfloat16", head_dim)
    files = [x.file for x in plan(problem, device_of_arch("sm_90a")).kernels]
    assert files == [
        "prepare/second_rows.cu",
        "sm90/double_backward.cu",
        "finish/dq.cu",
        "simt/double_backward_dkdv.cu",
        "simt/double_backward_dq.cu",
    ]


@on_kernels
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "causal"),
    [(64, 64, False), (128, 128, True), (40, 72, True), (96, 64, False)],
)
def test_is_the_references(backend, head_dim, head_dim_v, causal):
    grouped = replace(PLAIN, batch=2, num_heads_q=4, num_heads_kv=2)
    case = replace(grouped, head_dim=head_dim, head_dim_v=head_dim_v,
                   causal=causal)  # fmt: skip
    check(case, tangents(case), Apart(backend))


@on_kernels
@pytest.mark.parametrize("moving", ["q", "k", "v", "qv", "kv"])
def test_some_inputs_move(backend, moving):
    """A block takes several key tiles, of a step each.

    Without a causal mask no simt computes anew what is wrong by NaN. If q
    moves, with one, a term T of query 10 is less than a float16's lowest
    number: d2Q of head 1, of positive keys, is computed again.
    """
    at_10, at_99 = (0, 10, 1), (0, 99)
    spoiled = (("dout", at_10, "8e3"), ("q", at_10, "1"), ("k", at_99, "1"),
               ("v", at_99, "-1")) if moving == "q" else ()  # fmt: skip
    case = replace(PLAIN, dtype="float16", seqlen_q=60, seqlen_k=400,
                   causal=moving == "q", spoiled=spoiled,
                   on=replace(ON, seed=0, num_sms=1))  # fmt: skip
    check(case, tangents(case, moving), backend)


@on_kernels
@pytest.mark.parametrize("seqlens", [(1, 300), (300, 40), (129, 64)])
def test_lengths_that_no_tile_divides(backend, seqlens):
    """With fewer keys than queries, the first rows see none."""
    case = replace(PLAIN, seqlen_q=seqlens[0], seqlen_k=seqlens[1],
                   causal=True)  # fmt: skip
    check(case, tangents(case), backend)


@on_kernels
def test_deterministic_calls_sum_in_order(backend, monkeypatch):
    """One block takes all key tiles in the second call.

    Which lacks the recomputing kernels: what is finite is not flagged, though
    key tiles have more flags than query tiles.
    """
    grouped = replace(PLAIN, deterministic=True, causal=True)
    check(grouped, tangents(grouped), backend)
    case = replace(grouped, seqlen_q=70, seqlen_k=129, num_heads_q=3,
                   num_heads_kv=3)  # fmt: skip
    direction = tangents(case)
    first = call_double_backward(case, direction, backend)
    monkeypatch.setattr(
        sm90_double_backward,
        "recompute_launch",
        lambda kernel, *_: Launch(kernel, 0),
    )
    other = replace(case, on=replace(ON, seed=9, resident=1, num_sms=1))
    again = call_double_backward(other, direction, backend)
    for name, x in first.items():
        assert_bitwise(again[name], x, name)


@on_kernels
@pytest.mark.parametrize(
    "names", [("dout", "k"), ("v", "q"), ("q", "dout"), ("k", "v")]
)
def test_a_nan_of_a_masked_token_is_not_read(backend, names):
    """Its tiles hold rows that do not see it: simt computes those anew, with
    dlse. All but dout are cotangents. A name for each batch element, in which
    the last head alone has the NaN.
    """
    case = replace(
        PLAIN, batch=2, seqlen_q=130, num_heads_kv=2, head_dim=40,
        head_dim_v=72, causal=True,
    )  # fmt: skip
    direction, given = tangents(case, "qkv"), {}
    given["dout"] = inputs(case)[3]
    for batch, name in enumerate(names):
        {**direction, **given}[name][batch, -10, -1, -1] = np.nan
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (Apart(backend), NUMPY)
    )
    assert_near(got, want, case)
    assert not all(np.isfinite(y.astype("f4")).all() for y in got.values())
