"""Runs a small kernel of a test's own, on the emulator or on a GPU.

Its file has one kernel of the file's name, with one argument::

    struct Arguments { const void* x; void* out; int size; };
    extern "C" __global__ void doubled(const __grid_constant__ Arguments a)
"""

from pathlib import Path

import numpy as np
import pytest

from cuflash import compiler, emulator
from cuflash.plan import KernelPlan
from helpers.backends import CupyBackend
from helpers.host_compiler import needs_compiler

KERNELS = Path(__file__).parent.parent / "kernels"

on_both = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("emulated", marks=needs_compiler),
        pytest.param("gpu", marks=pytest.mark.gpu),
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
        In ``tests/kernels/``, without its ``.cu``.
    arguments : dict
        The fields of the argument struct, in its order: ints, and arrays,
        of which the kernel gets a pointer (null, if there are no elements).
        It may write to an array if NumPy may (`read_only`).
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
    """A view of the array that nobody may write to."""
    view = array.view()
    view.flags.writeable = False
    return view


def _run_on_gpu(kernel, blocks, arguments):
    import cupy

    from cuflash.launch import device

    gpu = CupyBackend()
    placed = {
        name: gpu.place(value)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    values = {
        name: np.uint64(placed[name].data.ptr)
        if name in placed
        else np.int32(value)
        for name, value in arguments.items()
    }
    struct = np.dtype([(n, x.dtype) for n, x in values.items()], align=True)
    argument = np.array(tuple(values.values()), struct)
    function = compiler.function(kernel, device(cupy.cuda.Device().id))
    function(
        (blocks,),
        (kernel.threads,),
        (argument,),
        shared_mem=kernel.shared_bytes,
    )
    for name, value in placed.items():
        if arguments[name].flags.writeable:
            arguments[name][...] = gpu.fetch(value)
