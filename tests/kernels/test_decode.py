"""Few queries, many keys: decode/forward.cu and finish/merge_splits.cu."""

from dataclasses import replace

import numpy as np
import pytest

import cuflash
import strategies
from helpers import calls, expected
from helpers.backends import on_kernels
from helpers.checks import check_forward
from helpers.compare import assert_bitwise, assert_forward_matches
from helpers.data import Case, Emulation, inputs
from helpers.drawn import on_each_backend
from helpers.option_cases import ALL, ALONE

# Three queries of three heads a group are nine rows; the second tile of
# seven more is not full.
CASE = Case(
    "bfloat16", 2, 3, 600, 6, 2, 64, 64, seed=1,
    on=Emulation("sm_90a", num_sms=3, seed=1, resident=2),
)  # fmt: skip
OPTIONS = {**ALONE, "all": ALL}


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
@pytest.mark.parametrize(
    "head_dims", [(1, 8), (33, 64), (128, 72), (256, 256)]
)
def test_head_dims(backend, head_dims):
    head_dim, head_dim_v = head_dims
    check_forward(
        backend, replace(CASE, head_dim=head_dim, head_dim_v=head_dim_v)
    )


@on_kernels
@pytest.mark.parametrize("layout", ["heads_outside", "packed"])
def test_layouts(backend, layout):
    check_forward(backend, replace(CASE, layout=layout))


@on_kernels
@pytest.mark.parametrize("window", [(0, 0), (20, 0), (599, 599)])
def test_parts_without_a_visible_key(backend, window):
    check_forward(backend, replace(CASE, window=window))


@on_kernels
@pytest.mark.parametrize("array", ["k", "v"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_masked_value_does_not_spread(backend, array, value):
    """Of the last key, which only the last query sees; and key 9 of all."""
    spoiled = ((array, (0, 599), value), (array, (1, 9), value))
    check_forward(backend, replace(CASE, causal=True, spoiled=spoiled))


@on_kernels
def test_results_do_not_depend_on_the_order_of_warps(backend):
    q, k, v, _ = inputs(CASE)
    first = calls.forward(backend, CASE, q, k, v)
    other = replace(CASE, on=replace(CASE.on, seed=7, resident=5))
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
@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 128])
def test_a_number_of_parts(backend, num_splits):
    """600 keys are five tiles of 128."""
    case = replace(CASE, causal=True)
    q, k, v, _ = inputs(case)
    got = in_parts(backend, case, (q, k, v), num_splits)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@pytest.mark.parametrize("seqlen_k", [0, 1, 127])
def test_parts_of_few_keys(backend, seqlen_k):
    case = replace(CASE, seqlen_k=seqlen_k)
    q, k, v, _ = inputs(case)
    got = in_parts(backend, case, (q, k, v), 3)
    want = expected.forward(q, k, v, **case.meaning())
    assert_forward_matches(got, want, case)


@on_kernels
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sequence_has_the_same_bits_alone(backend, num_splits):
    """On a GPU with few SMs as well."""
    q, k, v, _ = inputs(replace(CASE, batch=40, num_heads_q=8, seqlen_q=1))
    of_all = in_parts(backend, CASE, (q, k, v), num_splits)
    alone = in_parts(
        backend, replace(CASE, on=replace(CASE.on, num_sms=50)),
        [x[7:8] for x in (q, k, v)], num_splits,
    )  # fmt: skip
    for name, a, b in zip(("out", "lse"), of_all, alone, strict=True):
        assert_bitwise(a[7:8], b, name)
