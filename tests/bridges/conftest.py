"""Devices for tests of bridges: a GPU, and an emulated one."""

import pytest

from helpers.host_compiler import needs_compiler


@pytest.fixture(
    params=[
        pytest.param("Gpu", id="gpu", marks=pytest.mark.gpu),
        pytest.param("Emulated", id="emulated", marks=needs_compiler),
    ]
)
def device(request):
    """A device of torch, of `torch_devices.py`."""
    import torch_devices

    with getattr(torch_devices, request.param).running() as found:
        yield found
