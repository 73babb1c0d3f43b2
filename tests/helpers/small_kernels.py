"""Runs a test's own small kernel on the emulator or on a GPU.

Its file has one kernel of the file's name, with one argument::

    struct Arguments { const void* x; void* out; int size; };
    extern "C" __global__ void doubled(const __grid_constant__ Arguments a)
"""

from pathlib import Path

import numpy as np
import pytest

from cuflash import emulator
from cuflash.backends.emulator.machine import BoxesOf
from cuflash.build import nvrtc
from cuflash.launch.c_structs import padded
from cuflash.launch.structs import TensorMap
from cuflash.plans.plan import KernelPlan
from cuflash.request.layouts import Boxes
from helpers.backends import CupyBackend
from helpers.host_compiler import needs_compiler

KERNELS = Path(__file__).parent.parent / "cuda"

on_both = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("emulated", marks=needs_compiler),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)


def is_hopper():
    try:
        import cupy

        return cupy.cuda.Device().compute_capability == "90"
    except Exception:  # no CuPy, no driver, no device: all mean no
        return False


on_hopper = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("emulated", marks=needs_compiler),
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not is_hopper(), reason="no Hopper GPU"),
            ],
        ),
    ],
)


def run(
    file,
    arguments,
    backend="emulated",
    *,
    constants=None,
    threads=32,
    blocks=1,
    shared_bytes=0,
    arch="sm_90a",
    **options,
):
    """Launch a kernel and wait for its end.

    Parameters
    ----------
    file : str
        In ``tests/cuda/``, without its ``.cu``.
    arguments : dict
        The fields of the argument struct, in its order: ints, and arrays,
        of which the kernel gets a pointer (null, if there are no elements)
        or, as `BoxesOf`, a TensorMap. It may write to an array if NumPy may
        (`read_only`).
    backend : str
        "emulated", or "gpu": the current device.
    constants : dict, optional
        Names to values, for the top of the kernel's text.
    threads, blocks, shared_bytes : int
    arch : str
        What is emulated.
    **options
        Of `emulator.active`: ``seed``, ``resident``, ``timeout``.
    """
    kernel = KernelPlan(
        str(KERNELS / f"{file}.cu"),
        Path(file).name,
        tuple((constants or {}).items()),
        threads,
        shared_bytes,
    )
    if backend == "emulated":
        with emulator.active(arch, **options) as emulated:
            emulated.launch(kernel, blocks, **arguments)
    else:
        _run_on_gpu(kernel, blocks, arguments)


def read_only(array):
    """A read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view


def _run_on_gpu(kernel, blocks, arguments):
    import cupy

    from cuflash.backends import cupy as cuda

    gpu = CupyBackend()
    machine = cuda.backend(cupy.cuda.Device().id)
    placed, values = {}, {}
    for name, value in arguments.items():
        if isinstance(value, BoxesOf):
            placed[name] = gpu.place(value.array), value.array
            boxes = Boxes.of(value.array, value.rows)
            encoded = machine.tensor_map(placed[name][0].data.ptr, boxes)
            values[name] = np.frombuffer(encoded, TensorMap)[0]
        elif isinstance(value, np.ndarray):
            placed[name] = gpu.place(value), value
            values[name] = np.uint64(placed[name][0].data.ptr)
        else:
            values[name] = np.int32(value)
    kinds = [(name, value.dtype) for name, value in values.items()]
    aligned = 64 if TensorMap in dict(kinds).values() else 8
    struct = padded(aligned, *kinds)
    argument = np.zeros((), struct)
    for name, value in values.items():
        argument[name] = value
    function = nvrtc.function(kernel, machine.device())
    function(
        (blocks,),
        (kernel.threads,),
        (argument,),
        shared_mem=kernel.shared_bytes,
    )
    for on_gpu, array in placed.values():
        if array.flags.writeable:
            array[...] = gpu.fetch(on_gpu)
