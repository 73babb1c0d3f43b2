"""NCCL with one rank, and threads that share a GPU."""

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import nccl_library
from helpers.dtypes import DTYPES

gpu = pytest.mark.gpu


@pytest.fixture(params=nccl_library.NAMES)
def group(request, cp):
    try:
        nccl_library.library(request.param)
    except cuflash.UnsupportedError as error:
        pytest.skip(str(error))
    unique_id = distributed.unique_id(request.param)
    group = distributed.NcclGroup(
        0, 1, unique_id, timeout=20.0, library=request.param
    )
    yield group
    group.close()


@gpu
@pytest.mark.parametrize("dtype", [*DTYPES, "int64"])
def test_an_array_to_itself(group, cp, dtype):
    host = np.arange(1, 65).astype(DTYPES.get(dtype, dtype))
    sent, got = cp.asarray(host), cp.zeros_like(cp.asarray(host))
    group.exchange([(sent, 0)], [(got, 0)]).wait()
    group.synchronize()
    assert (cp.asnumpy(got) == host).all()
    assert group.bytes_sent == host.nbytes


@gpu
def test_bytes_and_calls_of_one_rank(group, cp):
    assert group.gather_bytes(b"abc") == [b"abc"]
    q = cp.ones((1, 8, 2, 16), cp.float16)
    out, lse = distributed.forward(q, q, q, group=group, return_lse=True)
    gradients = distributed.backward(out, q, q, q, out, lse, group=group)
    assert [x.shape for x in gradients] == [q.shape] * 3


@gpu
def test_an_exchange_that_nobody_answers(group, cp):
    """A receive without a send: the watchdog ends it."""
    group._watchdog.timeout = 0.5
    got = cp.zeros(4)
    group.exchange([], [(got, 0)]).wait()
    with pytest.raises(cuflash.GroupError, match="left the group"):
        group.synchronize()
    with pytest.raises(cuflash.GroupError):
        group.exchange([(got, 0)], [])


@gpu
def test_numpy_arrays(group):
    with pytest.raises(cuflash.DTypeError, match="expected a CuPy array"):
        group.exchange([(np.zeros(3), 0)], [])


def test_a_library_that_there_is_not(monkeypatch):
    from cuflash import api

    monkeypatch.setattr(api, "on_cuda", lambda: None)
    with pytest.raises(cuflash.ValueRangeError, match="'mpi', expected one"):
        nccl_library.library("mpi")
