"""The memory that calls allocate, counted without a GPU.

On a GPU gpu/test_large.py measures it.
"""

import numpy as np
import pytest

from cuflash.launch import attention as execute
from cuflash.request.validate import attention as validate
from helpers.counting import Counting
from helpers.data import Case, shapes
from helpers.dtypes import DTYPES, lse_dtype

TOKENS, HEADS, HEAD_DIM = 65536, 2, 64
CASE = {
    "seqlen_q": TOKENS,
    "seqlen_k": TOKENS,
    "num_heads_q": HEADS,
    "num_heads_kv": HEADS,
    "head_dim": HEAD_DIM,
    "head_dim_v": HEAD_DIM,
}


def arrays(dtype):
    case = Case(dtype, **CASE)
    made = {
        name: np.zeros(shape, DTYPES[dtype])
        for name, shape in shapes(case).items()
    }
    return made.pop("dout"), made


def row_bytes(dtype):
    """A number for each query: lse, or delta."""
    return lse_dtype(DTYPES[dtype]).itemsize * HEADS * TOKENS


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_forward_grows_with_rows(dtype):
    """A matrix of pairs would be 8 GiB a head."""
    _, qkv = arrays(dtype)
    machine = Counting("sm_80")
    execute.forward(validate.forward(**qkv, return_lse=True), machine)
    out, row = qkv["q"].nbytes, row_bytes(dtype)
    assert machine.nbytes == out + row


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_backward_adds_sums_of_dq_and_rows(dtype):
    dout, qkv = arrays(dtype)
    lse = np.zeros((1, HEADS, TOKENS), lse_dtype(DTYPES[dtype]))
    machine = Counting("sm_80")
    call = validate.backward(dout, **qkv, out=dout, lse=lse)
    execute.backward(call, machine)
    gradients, row = 3 * qkv["q"].nbytes, row_bytes(dtype)
    sums = row * HEAD_DIM if dtype == "bfloat16" else 0
    assert machine.nbytes == gradients + sums + row


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_backward_into_given_arrays_adds_none(dtype):
    dout, qkv = arrays(dtype)
    lse = np.zeros((1, HEADS, TOKENS), lse_dtype(DTYPES[dtype]))
    given = {f"d{name}": np.empty_like(x) for name, x in qkv.items()}
    machine = Counting("sm_80")
    call = validate.backward(dout, **qkv, out=dout, lse=lse, dlse=lse, **given)
    execute.backward(call, machine)
    row = row_bytes(dtype)
    assert machine.nbytes == (HEAD_DIM + 1 if dtype == "bfloat16" else 1) * row
