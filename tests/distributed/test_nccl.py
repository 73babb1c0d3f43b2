"""NCCL with one rank, and threads that share a GPU."""

import numpy as np
import pytest

import cuflash
from cuflash import distributed
from cuflash.distributed import nccl_library
from helpers.compare import assert_elements
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
    assert_elements(cp.asnumpy(got), host, "cp.asnumpy(got)")
    assert group.bytes_sent == host.nbytes


@gpu
def test_bytes_and_calls_of_one_rank(group, cp):
    assert group.gather_bytes(b"abc") == [b"abc"]
    q = cp.ones((1, 8, 2, 16), cp.float16)
    out, lse = distributed.forward(q, q, q, group=group, return_lse=True)
    gradients = distributed.backward(out, q, q, q, out, lse, group=group)
    assert [x.shape for x in gradients] == [q.shape] * 3


@gpu
def test_what_nccl_refuses(group, cp):
    """It knows that nobody sends, of one rank."""
    with pytest.raises(cuflash.GroupError, match="NCCL failed"):
        group.exchange([], [(cp.zeros(4), 0)])


def on_two_devices(cp, function, timeout):
    """Run a function on two ranks, each with a device of its own."""
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    unique_id = distributed.unique_id()

    def of_rank(board):
        with cp.cuda.Device(board.rank):
            group = distributed.NcclGroup(
                board.rank, 2, unique_id, timeout=timeout
            )
            return function(group)

    return distributed.run_threads(2, of_rank)


@gpu
def test_an_array_to_another_device(cp):
    def of_rank(group):
        own, got = cp.full(8, group.rank), cp.zeros(8, int)
        group.exchange([(own, 1 - group.rank)], [(got, 1 - group.rank)]).wait()
        group.synchronize()
        return int(got.sum())

    assert on_two_devices(cp, of_rank, 60.0) == [8, 0]


@gpu
def test_a_rank_that_does_not_answer(cp):
    """The watchdog ends the exchange of the other."""

    def of_rank(group):
        if group.rank == 1:
            return None
        # Connections are made by the first exchange, which waits on the host.
        with pytest.raises(cuflash.GroupError):
            group.exchange([], [(cp.zeros(4), 1)]).wait()
            group.synchronize()
        with pytest.raises(cuflash.GroupError, match="left the group"):
            group.exchange([(cp.zeros(4), 1)], [])

    on_two_devices(cp, of_rank, 2.0)


@gpu
def test_numpy_arrays(group):
    with pytest.raises(cuflash.DTypeError, match="expected a CuPy array"):
        group.exchange([(np.zeros(3), 0)], [])


def test_a_library_that_there_is_not(monkeypatch):
    from cuflash.api import arrays as api_arrays

    monkeypatch.setattr(api_arrays, "on_cuda", lambda: None)
    with pytest.raises(cuflash.ValueRangeError, match="'mpi', expected one"):
        nccl_library.library("mpi")
