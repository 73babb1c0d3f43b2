"""double_backward by the kernels: the gradients of backward."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st

import strategies
from helpers.backends import CUPY, EMULATED, on_kernels
from helpers.compare import assert_matches
from helpers.data import Case, Emulation
from helpers.derivatives import (
    EVERYTHING,
    GROUPED,
    INPUTS,
    assert_near,
    call_double_backward,
    expected_double_backward,
    tangents,
)
from helpers.drawn import on_each_backend
from helpers.dtypes import DTYPES

ON = Emulation("sm_80", seed=3)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
two_kinds_of_calls = pytest.mark.parametrize(
    "fields", [GROUPED, EVERYTHING], ids=["grouped", "everything"]
)


def exact(case, direction):
    """Return the reference's second gradients."""
    found = expected_double_backward(case, direction)
    return {name: x.ref for name, x in found.items()}


# Values ---------------------------------------------------------------------


@st.composite
def cases(draw, backend, dtype):
    """Draw a call, and blocks of its kernels: any dtype has these."""
    case = draw(strategies.optional_cases(backend, dtype=dtype, longest=100))
    block_q, block_k = draw(st.sampled_from([(None, None), (16, 8), (8, 16)]))
    return replace(case, block_q=block_q, block_k=block_k)


@on_each_backend(cases, each={"dtype": DTYPES}, backends=[EMULATED, CUPY])
def test_is_the_references(backend, case):
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    for name, want in expected_double_backward(case, direction).items():
        assert_matches(got[name], want, name, case)
    for name, want in call_double_backward(case, direction).items():
        assert got[name].dtype == want.dtype
        assert got[name].shape == want.shape


@on_kernels
@two_kinds_of_calls
@each_dtype
def test_errors_are_a_few_roundings(backend, dtype, fields):
    case = Case(dtype, on=ON, **fields)
    direction = tangents(case)
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact(case, direction), case)


@on_kernels
@pytest.mark.parametrize("name", [*INPUTS, None])
def test_one_input_moves(backend, name):
    case = Case("float32", on=ON, **EVERYTHING)
    direction = tangents(case, [name])
    got = call_double_backward(case, direction, backend)
    assert_near(got, exact(case, direction), case)
