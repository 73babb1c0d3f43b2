"""A CUDA device in this process's memory, whose kernels the emulator runs.

The product's own backend for CUDA runs on it: it plans for the device, fills
argument structs with addresses, and launches by the driver. `SUBSTITUTES`
names all that is replaced below it, and why; `OF_TORCH` and `OF_JAX` what the
bridges ask their libraries about a CUDA device (`emulated_torch.py` and
`bridges/jax_machines.py`).
"""

import ctypes
import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from cuflash import emulator
from cuflash.backends.emulator.machine import Machine
from cuflash.launch.structs import TensorMap
from cuflash.plans.plan import Launch

from . import fake_cupy

# (what is replaced, an attribute of EmulatedCuda, why)
SUBSTITUTES = (
    (
        "cuflash.build.nvrtc.function",
        "loaded",
        "the driver loads machine code: the emulator compiles the same text",
    ),
    (
        "cuflash.backends.cupy.CupyBackend.launch",
        "noting_the_struct",
        "then the original: the driver gets an address, not the struct's type",
    ),
    (
        "cuflash.backends.cupy._launch_as",
        "launch_as",
        "cuLaunchKernelEx is the driver's",
    ),
    (
        "cuflash.backends.cupy.CupyBackend.tensor_map",
        "tensor_map",
        "cuTensorMapEncodeTiled is the driver's, in a layout of its own",
    ),
    # Of the fake module (fake_cupy.py) in CuPy's place, which needs a driver:
    # what it knows of devices, streams and contexts are constants.
    ("cupy.cuda.driver.launchKernel", "launch", "runs the kernel"),
    ("cupy.cuda.runtime.getDeviceProperties", "properties", "of the device"),
    ("cupy.cuda.runtime.memsetAsync", "fill", "memory is this process's"),
    ("cupy.cuda.runtime.memcpyAsync", "read", "memory is this process's"),
)

# The same, of EmulatedTorch.
OF_TORCH = (
    (
        "cuflash.torch.request.backend_of",
        "backend_of",
        "tells CUDA tensors by is_cuda and get_device: here all are",
    ),
    (
        "cuflash.torch.backend._stream",
        "stream",
        "torch's current stream: a CPU has none",
    ),
    (
        "cuflash.torch.backend._new",
        "new_tensor",
        "torch's allocator of CUDA memory",
    ),
    (
        "cuflash.torch.backend.TorchBackend.address",
        "noting_memory",
        "then the original: kernels access all memory of a GPU, but of this "
        "process the tensors of their call",
    ),
    (
        "torch.cuda.current_stream",
        "current_stream",
        "as _stream, for calls that ranks share",
    ),
    (
        "cupy.from_dlpack",
        "to_array",
        "arrays of the fake CuPy do not compute: NumPy's do, for ranks",
    ),
)

# The same, of bridges/jax_machines.py's EmulatedJax.
OF_JAX = (
    (
        "cuflash.jax.machine.Cuda.first_device",
        "first_device",
        "JAX's list of CUDA devices is empty",
    ),
    (
        "cuflash.jax.machine.Cuda.open",
        "noting_memory",
        "then the original: a CPU's callback has no stream, and of this "
        "process kernels access the buffers of their call",
    ),
)

# Fields of argument structs that hold 64 bits, but no address.
NUMBERS = ("seed", "cache_seqlen", "mod_numbers")
# Allocations that are remembered: a launch has some thirty.
KEPT = 256


@dataclass(eq=False)
class Region:
    """Memory of one allocation, which is kept alive."""

    address: int
    memory: np.ndarray
    written: bool


class EmulatedCuda:
    """Device 0, of an architecture.

    launches : (entry, stream) of each kernel that ran.
    """

    def __init__(self, arch, seed=0):
        with emulator.active(arch, seed) as self.machine:
            pass
        self.launches = []
        self._kernels = []
        self._regions = OrderedDict()
        self._of_thread = threading.local()
        self._lock = threading.Lock()

    # Memory: on a GPU the driver knows each allocation ----------------------

    def hold(self, address, memory, written=False):
        """Let kernels access an allocation: its bytes, an array of uint8."""
        with self._lock:
            region = self._regions.pop(address, None)
            if region is None or region.memory.size != memory.size:
                region = Region(address, memory, written)
            region.written |= written
            self._regions[address] = region
            while len(self._regions) > KEPT:
                self._regions.popitem(last=False)

    def _region(self, address):
        for region in reversed(self._regions.values()):
            if 0 <= address - region.address < max(region.memory.size, 1):
                return region
        raise AssertionError(f"{address:#x} is in no allocation of a call")

    def new(self, nbytes):
        """New memory: all bytes 1, NaN in every dtype; aligned as CUDA's."""
        return Machine(self.machine).empty(nbytes, np.uint8)

    def fill(self, address, value, nbytes, stream):
        ctypes.memset(address, value, nbytes)

    def read(self, target, source, nbytes, kind, stream):
        ctypes.memmove(target, source, nbytes)

    # Kernels -----------------------------------------------------------------

    def properties(self, index):
        device = self.machine.device()
        capability, name = device.capability, device.name or device.arch
        return {
            "name": name.encode(), "major": capability // 10,
            "minor": capability % 10,
            "multiProcessorCount": device.num_sms,
            "sharedMemPerBlockOptin": device.shared_bytes,
            "l2CacheSize": device.l2_bytes,
            # Two transfers of a byte per clock, which is in kHz.
            "memoryClockRate": (device.bandwidth or 0) * 500_000,
            "memoryBusWidth": 8,
        }  # fmt: skip

    def loaded(self, kernel, device):
        """A function whose handle is the kernel's number, from 1."""
        assert device.arch == self.machine.arch
        with self._lock:
            self._kernels.append(kernel)
            handle = SimpleNamespace(ptr=len(self._kernels))
        return SimpleNamespace(kernel=handle)

    def noting_the_struct(self, backend, loaded, arguments, kind):
        self._of_thread.kind = kind
        self._launch_of_backend(backend, loaded, arguments, kind)

    @staticmethod
    def tensor_map(address, boxes):
        return Machine.tensor_map(address, boxes)

    def launch_as(self, config, function, arguments):
        sizes = config.gridDimX, config.blockDimX, config.sharedMemBytes
        self._run(function, *sizes, int(config.hStream), arguments)

    def launch(self, function, x, y, z, threads, *rest):
        *ones, shared, stream, arguments, extra = rest
        assert (y, z, *ones, extra) == (1, 1, 1, 1, 0)
        self._run(function, x, threads, shared, stream, arguments)

    def _run(self, function, blocks, threads, shared, stream, arguments):
        kernel = self._kernels[function - 1]
        assert (threads, shared) == (kernel.threads, kernel.shared_bytes)
        start = ctypes.c_void_p.from_address(arguments).value
        kind = self._of_thread.kind
        struct = np.frombuffer(ctypes.string_at(start, kind.itemsize), kind)
        struct = struct.copy().reshape(())
        with self._lock:
            memory = Machine(self.machine)
            for value in _addresses(struct):
                if value:
                    region = self._region(int(value))
                    base = memory.address_of(region.memory, region.written)
                    value[...] = int(value) - region.address + base
            self.launches.append((kernel.entry, stream))
            memory.run((Launch(kernel, blocks),), struct)

    # Installation ------------------------------------------------------------

    def install(self, monkeypatch):
        """Put this device below `cuflash.backends.cupy`."""
        self.fake, backend = fake_cupy.in_place(monkeypatch)
        self._launch_of_backend = backend.CupyBackend.launch
        replace(monkeypatch, SUBSTITUTES, self)
        return backend


def _addresses(struct):
    """A struct's pointers and those in its TensorMaps, as 0-D views."""
    for name in struct.dtype.names:
        field = struct[name]
        if field.dtype == TensorMap:
            yield field["opaque"][:1].reshape(())
        elif field.dtype.names:
            yield from _addresses(field)
        elif field.dtype == np.uint64 and name not in NUMBERS:
            each = field.reshape(-1)  # several may be one field
            yield from (each[i : i + 1].reshape(()) for i in range(each.size))


def replace(monkeypatch, substitutes, stand_in):
    """Install attributes of `stand_in` as a table says."""
    for target, ours, _why in substitutes:
        owner, _, name = target.rpartition(".")
        found = getattr(stand_in, ours)
        is_method = owner.rpartition(".")[2][:1].isupper()
        if is_method and name != "tensor_map":
            found = _as_method(found)
        elif is_method:
            found = staticmethod(found)
        monkeypatch.setattr(target, found)


def _as_method(function):
    return lambda *given, **named: function(*given, **named)
