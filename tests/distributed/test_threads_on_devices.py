"""Threads with a device each, with a stand-in for CuPy and on GPUs."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import in_process
from helpers.compare import assert_elements


def test_devices_are_connected_where_they_can_be():
    """Each with the others, and the caller's device stays current."""
    current, connected = [7], []
    runtime = SimpleNamespace(
        getDevice=lambda: current[-1],
        setDevice=current.append,
        deviceCanAccessPeer=lambda a, b: {a, b} != {0, 2},
        _deviceEnsurePeerAccess=lambda x: connected.append((current[-1], x)),
    )
    in_process._connect(runtime, [0, 1, 2])
    assert connected == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert current[-1] == 7


@pytest.mark.gpu
def test_an_array_to_another_device(cp):
    count = cp.cuda.runtime.getDeviceCount()

    def of_rank(group):
        assert group.shares_device == (count == 1)
        own, got = cp.full(8, group.rank), cp.zeros(8, int)
        group.exchange([(own, 1 - group.rank)], [(got, 1 - group.rank)]).wait()
        return cp.asnumpy(got)

    devices = [0, 1 % count]
    for rank, got in enumerate(
        distributed.run_threads(2, of_rank, devices=devices)
    ):
        assert_elements(got, np.full(8, 1 - rank), "got")
