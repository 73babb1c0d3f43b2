"""Few queries, many keys: decode/forward.cu and decode/forward_simt.cu."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import cuflash
import strategies
from cuflash.plans.plan import device_of_arch, plan
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import check_forward
from helpers.compare import assert_bitwise, assert_forward_matches
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.kernels import small_problem
from helpers.option_cases import ALL, with_scales

# Three queries of three heads a group are nine rows; the second tile of
# seven more is not full.
CASE = Case(
    "bfloat16", 2, 3, 600, 6, 2, 64, 64, seed=1,
    on=Emulation("sm_90a", num_sms=3, seed=1, resident=2),
)  # fmt: skip
# What is not linear does not negate scores for a scale below 0.
OPTIONS = {
    **with_scales(softcap=-0.3, bias=-0.2, slopes=-0.3),
    "all": {**ALL, "scale": -0.3},
}

# Two queries of three heads are six rows of a tile of eight; four of wide
# heads, whose second tile is not full.
CASES = {
    "mma": CASE,
    "float32": replace(CASE, dtype="float32", seqlen_q=2),
    "float64": replace(CASE, dtype="float64", seqlen_q=2),
    "wide": replace(
        CASE, dtype="float16", seqlen_q=2, head_dim=320, head_dim_v=264
    ),
    "sm_75": replace(
        CASE, dtype="float32", seqlen_q=2, on=replace(CASE.on, arch="sm_75")
    ),
}
SIMT = [name for name in CASES if name != "mma"]
on_cases = pytest.mark.parametrize("which", CASES)


def family_of(case, **changes):
    """Return the family that computes a case."""
    c = case
    problem = small_problem(
        "forward", c.dtype, c.head_dim, head_dim_v=c.head_dim_v,
        seqlen_q=c.seqlen_q, seqlen_k=c.seqlen_k, num_heads_q=c.num_heads_q,
        num_heads_kv=c.num_heads_kv, causal=c.causal, **changes,
    )  # fmt: skip
    return plan(problem, device_of_arch(c.on.arch)).family


@pytest.mark.parametrize("which", SIMT)
@pytest.mark.parametrize("num_splits", [None, 2])
def test_cases_of_the_kernel_on_cuda_cores(which, num_splits):
    case = CASES[which]
    assert family_of(case, num_splits=num_splits) == "decode_simt"


@on_each_backend(strategies.decode_cases)
def test_forward(backend, case):
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("num_sms", [1, 50])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(backend, name, num_sms):
    """In one part and in parts."""
    on = replace(CASE.on, num_sms=num_sms)
    check_forward(backend, replace(CASE, on=on, **OPTIONS[name]))


@on_kernels
@pytest.mark.parametrize("which", ["float32", "float64", "wide"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_on_cuda_cores(backend, name, which):
    """Each part of the keys is computed by several warps and blocks."""
    case = CASES[which]
    on = replace(case.on, num_sms=5)
    check_forward(backend, replace(case, on=on, **OPTIONS[name]))


@on_kernels
@pytest.mark.parametrize(
    "head_dims", [(1, 8), (33, 128), (128, 72), (256, 256)]
)
def test_head_dims(backend, head_dims):
    head_dim, head_dim_v = head_dims
    check_forward(
        backend, replace(CASE, head_dim=head_dim, head_dim_v=head_dim_v)
    )


@on_kernels
@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "head_dims"),
    [
        *product(
            ["float32", "float64"],
            [(1, 8), (33, 64), (128, 72), (257, 40), (512, 512)],
        ),
        ("float16", (511, 2)), ("bfloat16", (258, 260)),
        ("float16", (512, 512)),
    ],
)  # fmt: skip
def test_head_dims_on_cuda_cores(backend, dtype, head_dims, seqlen_q):
    """Loads of 2 to 16 bytes; from one to eight rows, up to 16 columns."""
    head_dim, head_dim_v = head_dims
    case = replace(
        CASE, dtype=dtype, seqlen_q=seqlen_q, head_dim=head_dim,
        head_dim_v=head_dim_v,
    )  # fmt: skip
    assert family_of(case) == "decode_simt"
    check_forward(backend, case)


@on_kernels
@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_groups_on_cuda_cores(backend, dtype, group_size):
    """As many rows in a tile."""
    case = replace(CASE, dtype=dtype, seqlen_q=1, num_heads_q=2 * group_size)
    check_forward(backend, case)


@on_kernels
@on_cases
@pytest.mark.parametrize(
    "layout", ["heads_outside", "packed", "misaligned", "tokens_backwards"]
)
def test_layouts(backend, layout, which):
    check_forward(backend, replace(CASES[which], layout=layout))


@on_kernels
@pytest.mark.parametrize("layout", ["contiguous", "packed", "misaligned"])
@pytest.mark.parametrize("head_dims", [(321, 323), (322, 258), (260, 324)])
def test_rows_that_are_not_aligned(backend, layout, head_dims):
    """16-bit rows of 2, 4 and 8 bytes times an odd number."""
    head_dim, head_dim_v = head_dims
    case = replace(
        CASES["wide"], layout=layout, head_dim=head_dim, head_dim_v=head_dim_v
    )
    check_forward(backend, case)


@on_kernels
@on_cases
@pytest.mark.parametrize("window", [(0, 0), (20, 0), (599, 599)])
def test_parts_without_a_visible_key(backend, window, which):
    check_forward(backend, replace(CASES[which], window=window))


@on_kernels
@on_cases
@pytest.mark.parametrize("array", ["k", "v"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_masked_value_does_not_spread(backend, array, value, which):
    """Of the last key, which only the last query sees; and key 9 of all."""
    spoiled = ((array, (0, 599), value), (array, (1, 9), value))
    case = replace(CASES[which], causal=True, spoiled=spoiled)
    check_forward(backend, case)


@on_kernels
@on_cases
def test_results_do_not_depend_on_the_order_of_warps(backend, which):
    case = CASES[which]
    q, k, v, _ = inputs(case)
    first = calls.forward(backend, case, q, k, v)
    other = replace(case, on=replace(case.on, seed=7, resident=5))
    again = calls.forward(backend, other, q, k, v)
    for name, a, b in zip(("out", "lse"), first, again, strict=True):
        assert_bitwise(np.asarray(a), np.asarray(b), name)


def in_parts(backend, case, arrays, num_splits):
    """Return out and lse with num_splits given."""
    placed = [backend.place(x) for x in arrays]
    with backend.running(case):
        results = cuflash.forward(
            *placed, causal=case.causal, num_splits=num_splits, return_lse=True
        )
    return [np.asarray(backend.fetch(x)) for x in results]


@on_kernels
@on_cases
@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 128])
def test_a_number_of_parts(backend, num_splits, which):
    """600 keys are five tiles of 128, or more tiles of fewer keys."""
    case = replace(CASES[which], causal=True)
    q, k, v, _ = inputs(case)
    got = in_parts(backend, case, (q, k, v), num_splits)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@on_cases
@pytest.mark.parametrize("seqlen_k", [0, 1, 127])
def test_parts_of_few_keys(backend, seqlen_k, which):
    case = replace(CASES[which], seqlen_k=seqlen_k)
    q, k, v, _ = inputs(case)
    got = in_parts(backend, case, (q, k, v), 3)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@on_cases
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sequence_has_the_same_bits_alone(backend, num_splits, which):
    """On a GPU with few SMs as well."""
    case = CASES[which]
    q, k, v, _ = inputs(replace(case, batch=40, num_heads_q=8, seqlen_q=1))
    of_all = in_parts(backend, case, (q, k, v), num_splits)
    alone = in_parts(
        backend, replace(case, on=replace(case.on, num_sms=50)),
        [x[7:8] for x in (q, k, v)], num_splits,
    )  # fmt: skip
    for name, a, b in zip(("out", "lse"), of_all, alone, strict=True):
        assert_bitwise(a[7:8], b, name)
