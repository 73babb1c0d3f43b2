"""double_backward by mma8/double_backward_roles.cu: float64, wide heads."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash.plans.plan import device_of_arch, plan
from helpers.backends import on_kernels
from helpers.compare import (
    assert_all,
    assert_bitwise,
)
from helpers.data import Case, Emulation, inputs, lse_gradient
from helpers.derivatives import (
    EVERYTHING,
    GROUPED,
    NUMPY,
    assert_near,
    call_double_backward,
    exact_double_backward,
    tangents,
)
from helpers.kernels import small_problem

ON = Emulation("sm_90a", seed=5)
WIDE = {"dtype": "float64", "head_dim": 128, "head_dim_v": 128, "on": ON}


def check(case, direction, backend):
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact_double_backward(case, direction), case)


@pytest.mark.parametrize(
    ("arch", "head_dim", "runs"),
    [("sm_90a", 128, True), ("sm_90a", 64, False), ("sm_80", 128, True)],
)
def test_wide_float64_heads_have_a_kernel_of_their_own(arch, head_dim, runs):
    problem = small_problem("double_backward", "float64", head_dim)
    files = [x.file for x in plan(problem, device_of_arch(arch)).kernels]
    assert ("mma8/double_backward_roles.cu" in files) == runs


@on_kernels
@pytest.mark.parametrize("fields", [GROUPED, EVERYTHING],
                         ids=["grouped", "everything"])  # fmt: skip
def test_errors_are_a_few_roundings(backend, fields):
    case = Case(**{**fields, **WIDE})
    check(case, tangents(case), backend)


@on_kernels
@pytest.mark.parametrize("moving", ["q", "k", "v"])
def test_one_input_moves(backend, moving):
    case = Case(seqlen_q=20, seqlen_k=40, causal=True, **WIDE)
    check(case, tangents(case, moving), backend)


@on_kernels
@pytest.mark.parametrize("seqlen_q", [1, 16, 17, 33, 49])
def test_few_query_tiles(backend, seqlen_q):
    """One to four, of three heads of a group, for one or two key tiles."""
    case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=50, num_heads_q=3,
                num_heads_kv=1, **WIDE)  # fmt: skip
    check(case, tangents(case), backend)


@on_kernels
@pytest.mark.parametrize("head_dims", [(128, 64), (104, 112), (64, 128)])
def test_head_dims_may_differ(backend, head_dims):
    d, dv = head_dims
    case = Case(batch=1, seqlen_q=40, seqlen_k=70, causal=True,
                **{**WIDE, "head_dim": d, "head_dim_v": dv})  # fmt: skip
    check(case, tangents(case), backend)


@on_kernels
@pytest.mark.parametrize("head_dim", [64, 128])
def test_less_shared_memory(backend, head_dim):
    """As sm_80 has: other tiles, at 128 of two warps of each role."""
    case = Case(batch=1, seqlen_q=40, seqlen_k=50, causal=True,
                **{**WIDE, "head_dim": head_dim, "head_dim_v": head_dim,
                   "on": Emulation("sm_80", seed=2)})  # fmt: skip
    check(case, tangents(case), backend)


@on_kernels
def test_packed_sequences(backend):
    """One without queries, one without keys, tokens of none."""
    case = Case(batch=1, seqlen_q=52, seqlen_k=71, num_heads_q=2,
                num_heads_kv=1, causal=True, dropout=0.25,
                offsets=((0, 16, 16, 50), (0, 9, 14, 70)), **WIDE)  # fmt: skip
    q, k, v, dout = (x[0] for x in inputs(case))
    out, lse = cuflash.forward(q, k, v, **case.meaning(), return_lse=True)
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse,
             "dlse": lse_gradient(case)[0]}  # fmt: skip
    direction = {x: y[0] for x, y in tangents(case).items()}
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (backend, NUMPY)
    )
    assert_near(got, want, case)


@on_kernels
def test_deterministic_calls_sum_in_order(backend):
    case = Case(batch=1, seqlen_q=60, seqlen_k=100, num_heads_q=2,
                num_heads_kv=1, causal=True, deterministic=True,
                **WIDE)  # fmt: skip
    first = call_double_backward(case, tangents(case), backend)
    other = replace(case, on=replace(ON, seed=9, resident=1))
    again = call_double_backward(other, tangents(case), backend)
    for name, x in first.items():
        assert_bitwise(again[name], x, name)


@on_kernels
def test_a_nan_reaches_what_reads_it(backend):
    """Of partly masked tiles only visible pairs are added.

    One array of queries and one of keys of each batch element has a NaN.
    """
    names = [("dout", "k"), ("q", "ddk"), ("ddq", "v"), ("ddv",)]
    case = Case(batch=len(names), seqlen_q=40, seqlen_k=40, num_heads_q=1,
                num_heads_kv=1, causal=True, window=(9, 0),
                **WIDE)  # fmt: skip
    direction, (q, k, v, dout) = tangents(case, "qkv"), inputs(case)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    options = {**case.meaning(), "return_lse": True}
    given["out"], given["lse"] = cuflash.forward(q, k, v, **options)
    moved = {f"dd{name}": x for name, x in direction.items()}
    for batch, of_batch in enumerate(names):
        for name in of_batch:
            (given | moved)[name][batch, 20] = np.nan
    got, want = (
        call_double_backward(case, direction, x, **given)
        for x in (backend, NUMPY)
    )
    assert_near(got, want, case)
    some = np.concatenate([x.reshape(len(names), -1) for x in got.values()], 1)
    assert_all(np.isnan(some).any(1), True, "NaN of a batch element")
