"""Other libraries' GPU arrays: read in place, results are CuPy's."""

import os
import warnings

import numpy as np
import pytest

import cuflash
from helpers.backends import CupyBackend
from helpers.calls import all_results
from helpers.compare import assert_bitwise
from helpers.data import Case, inputs

pytestmark = pytest.mark.gpu

GPU = CupyBackend()
SIXTEEN_BITS = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def quiet_import(name):
    """Import a library and ignore its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def torch():
    module = quiet_import("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    return module


@pytest.fixture(scope="module")
def jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = quiet_import("jax")
    if module.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    return module


class Foreign:
    """Has only __cuda_array_interface__, like Numba's arrays."""

    def __init__(self, array, read_only=False):
        interface = dict(array.__cuda_array_interface__)
        interface["data"] = interface["data"][0], read_only
        self.array = array
        self.__cuda_array_interface__ = interface


def inputs_on_gpu(dtype, layout="contiguous"):
    case = Case(dtype, 2, 100, 130, 4, 2, 64, 64, layout=layout)
    return [GPU.place(x) for x in inputs(case)]


def keep_busy(cp):
    """Queue some 100 ms of work on the current stream."""
    a = cp.ones((4096, 4096), cp.float32)
    for _ in range(30):
        a = a @ a * cp.float32(0)


def assert_same_results(cp, got, want):
    """backward gets CuPy's out and lse too: libraries may be mixed."""
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, cp.ndarray)
        assert_bitwise(cp.asnumpy(a), cp.asnumpy(b), "result")


@SIXTEEN_BITS
@pytest.mark.parametrize("layout", ["contiguous", "heads_outside", "packed"])
def test_torch_tensors(cp, torch, dtype, layout):
    arrays = inputs_on_gpu(dtype, layout)
    tensors = [torch.from_dlpack(x) for x in arrays]
    assert tensors[0].dtype == getattr(torch, dtype)
    assert_same_results(cp, all_results(*tensors), all_results(*arrays))


def test_torch_out_argument(cp, torch):
    q, k, v, _ = inputs_on_gpu("bfloat16")
    tensors = [torch.from_dlpack(x) for x in (q, k, v)]
    target = torch.full_like(tensors[0], float("nan"))
    cuflash.forward(*tensors, out=target)
    plain = cuflash.forward(q, k, v)
    got = cp.from_dlpack(target)
    assert_bitwise(cp.asnumpy(got), cp.asnumpy(plain), "out")


def test_torch_work_is_waited_for(cp, torch):
    """DLPack orders CuPy's stream after torch's."""
    q, k, v, _ = (torch.from_dlpack(x) for x in inputs_on_gpu("float16"))
    want = cuflash.forward(q, k, v)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        late += q
        got = cuflash.forward(late, k, v)
    assert_bitwise(cp.asnumpy(got), cp.asnumpy(want), "out")


@pytest.mark.parametrize("outside", [False, True])
def test_torch_waits_before_it_uses_memory_again(cp, torch, outside):
    """CuPy's stream is late; torch writes to what its user has deleted."""
    arrays = inputs_on_gpu("float16")[:3]
    want = cp.asnumpy(cuflash.forward(*arrays))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        given = [torch.from_dlpack(x).clone() for x in arrays]
        target = torch.empty_like(given[0])
        keep_busy(cp)
        out = target if outside else None
        got = cuflash.forward(*given, out=out)
        shapes = [x.shape for x in given]
        del given
        filled = [
            torch.full(shape, torch.nan, device="cuda", dtype=torch.float16)
            for shape in shapes
        ]
        got = got.clone() if outside else got
        del filled
    torch.cuda.synchronize()
    assert_bitwise(cp.asnumpy(cp.asarray(got)), want, "out")


def test_torch_tensor_that_requires_grad(torch):
    q = torch.zeros(4, 8, device="cuda", dtype=torch.float16)
    with pytest.raises(cuflash.UnsupportedError, match="requires grad"):
        cuflash.forward(q.requires_grad_(), q, q)


@SIXTEEN_BITS
def test_jax_arrays(cp, jax, dtype):
    arrays = inputs_on_gpu(dtype)
    theirs = [jax.numpy.asarray(cp.asnumpy(x)) for x in arrays]
    assert theirs[0].dtype == dtype
    assert_same_results(cp, all_results(*theirs), all_results(*arrays))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "every_other_token"])
def test_cuda_array_interface(cp, layout, read_only):
    arrays = inputs_on_gpu("float16", layout)
    foreign = [Foreign(x, read_only) for x in arrays]
    assert_same_results(cp, all_results(*foreign), all_results(*arrays))


def test_read_only_out_is_refused(cp):
    q, k, v, dout = inputs_on_gpu("float16")
    with pytest.raises(cuflash.ValueRangeError, match="read-only"):
        cuflash.forward(q, k, v, out=Foreign(dout, read_only=True))


def test_numpy_among_cupy_is_refused(cp):
    q, k, v, _ = inputs_on_gpu("float16")
    with pytest.raises(cuflash.DTypeError, match="k is a NumPy array"):
        cuflash.forward(q, cp.asnumpy(k), v)


def test_inputs_are_not_written(cp):
    arrays = inputs_on_gpu("bfloat16", "misaligned")
    before = [cp.asnumpy(x) for x in arrays]
    all_results(*arrays)
    for array, old in zip(arrays, before, strict=True):
        assert_bitwise(cp.asnumpy(array), old, "input")


def test_another_device_than_the_current_one(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    want = [cp.asnumpy(x) for x in all_results(*inputs_on_gpu("bfloat16"))]
    with cp.cuda.Device(1):
        arrays = inputs_on_gpu("bfloat16")
    got = all_results(*arrays)  # device 0 is current here
    for a, b in zip(got, want, strict=True):
        assert a.device.id == 1
        assert_bitwise(np.asarray(a.get()), b, "result")
