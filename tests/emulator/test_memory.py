"""NumPy arrays as an emulated kernel's memory, in both directions."""

import numpy as np
import pytest

import cuflash
from cuflash import emulator
from cuflash.backends.emulator.machine import Emulator, Machine
from cuflash.errors import KernelFault
from cuflash.plans.plan import KernelPlan
from helpers.compare import (
    assert_all,
    assert_bitwise,
    assert_elements,
)
from helpers.data import Case, inputs
from helpers.host_compiler import needs_compiler

pytestmark = needs_compiler

# out[i * out_step] = x[i * x_step] for as many i as there are threads
TEXT = """\
#include "common/types.cuh"
struct Arguments { const i64* x; i64* out; int x_step, out_step; };
extern "C" __global__ void copy(const __grid_constant__ Arguments a) {
    a.out[(i64)threadIdx.x * a.out_step] = a.x[(i64)threadIdx.x * a.x_step];
}
"""
NUMBERS = np.arange(1, 41)


@pytest.fixture
def copy(tmp_path):
    """Copy one strided array to another, by an emulated kernel."""
    file = tmp_path / "copy.cu"
    file.write_text(TEXT)

    def run(x, out, out_step=None, x_step=None):
        kernel = KernelPlan(str(file), "copy", (), threads=40, shared_bytes=0)
        with emulator.active() as emulated:
            emulated.launch(
                kernel,
                1,
                x=x,
                out=out,
                x_step=x_step or x.strides[0] // 8,
                out_step=out_step or out.strides[0] // 8,
            )

    return run


def test_results_come_back_to_their_strides(copy):
    store = np.full(120, -1)
    copy(NUMBERS, store[1::3])
    assert_elements(store[1::3], NUMBERS, "store[1::3]")
    assert_all(store[0::3], -1, "store[0::3]")
    assert_all(store[2::3], -1, "store[2::3]")


def test_negative_strides(copy):
    store = np.zeros(40, int)
    copy(NUMBERS[::-1], store)
    assert_elements(store, NUMBERS[::-1], "store")
    copy(NUMBERS, store[::-1])
    assert_elements(store, NUMBERS[::-1], "store")


def test_an_input_that_repeats_one_element(copy):
    store = np.zeros(40, int)
    copy(np.broadcast_to(7, 40), store)
    assert_all(store, 7, "store")


def test_one_array_as_two_fields(copy):
    store = NUMBERS.copy()
    copy(store, store)
    assert_elements(store, NUMBERS, "store")


def test_gaps_may_not_be_touched(copy):
    store = np.zeros(80, int)
    with pytest.raises(KernelFault, match="of out, in a gap between"):
        copy(NUMBERS, store[::2], out_step=1)
    with pytest.raises(KernelFault, match="of x, in a gap between"):
        copy(store[::2], np.zeros(40, int), x_step=1)


def test_read_only_arrays_stay_read_only(copy):
    store = np.zeros(40, int)
    store.flags.writeable = False
    with pytest.raises(KernelFault, match="of out, which is an input"):
        copy(NUMBERS, store)


def test_after_a_fault_nothing_is_written(copy):
    store = np.zeros(40, int)
    with pytest.raises(KernelFault, match="of x, which has 312"):
        copy(NUMBERS[1:], store)
    assert_all(store, 0, "store")


@pytest.mark.parametrize("dtype", ["<f2", ">f8", np.int32])
@pytest.mark.parametrize("shape", [0, 5, (), (3, 4), (2, 0)])
def test_new_memory_is_as_on_a_gpu(shape, dtype):
    array = Machine(Emulator("sm_80")).empty(shape, dtype)
    assert array.shape == np.zeros(shape).shape
    assert array.dtype == np.dtype(dtype).newbyteorder("=")
    assert array.ctypes.data % 256 == 0 or array.size == 0
    assert set(array.tobytes()) <= {0xFF}


def test_fields_of_an_argument_struct():
    machine = Machine(Emulator("sm_80"))
    kinds = [machine.field(x).dtype for x in (1, 1.0, True, np.int64(1))]
    assert kinds == [np.int32, np.float64, np.bool_, np.int64]
    array = np.zeros(3)
    address = machine.field(array)
    assert address.dtype == np.uint64
    assert address % 4096 == array.ctypes.data % 4096
    assert machine.field(np.zeros(0)) == 0


# Arrays as NumPy alone has them ------------------------------------------


def other_bytes(array):
    return array.astype(array.dtype.newbyteorder(">"))


def in_records(array):
    """Misaligned elements, at a stride that is no multiple of their size."""
    record = np.dtype([("odd", "u1"), ("x", array.dtype)])
    return _filled(np.zeros(array.shape, record)["x"], array)


def off_by_a_byte(array):
    room = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return _filled(room.view(array.dtype).reshape(array.shape), array)


def _filled(view, array):
    view[...] = array
    return view


@pytest.mark.parametrize("made", [other_bytes, in_records, off_by_a_byte])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_odd_arrays_are_as_good(made, dtype):
    q, k, v, dout = inputs(Case(dtype))
    with emulator.active("sm_80"):
        plain = cuflash.forward(q, k, v, return_lse=True)
        plain += cuflash.backward(dout, q, k, v, *plain, deterministic=True)
        q, k, v, dout = (made(x) for x in (q, k, v, dout))
        odd = cuflash.forward(q, k, v, return_lse=True)
        odd += cuflash.backward(
            dout, q, k, v, *map(made, odd), deterministic=True
        )
        out = made(dout)
        assert cuflash.forward(q, k, v, out=out) is out
    for a, b in zip(odd, plain, strict=True):
        assert_bitwise(a, b, made.__name__)
    assert_bitwise(out.astype(plain[0].dtype), plain[0], "out")


def test_merged_states_of_odd_arrays():
    q, k, v, _ = inputs(Case())
    with emulator.active("sm_80"):
        state = cuflash.forward(q, k, v, return_lse=True)
        plain = cuflash.merge_states(*state, *state)
        odd = [in_records(x) for x in state]
        merged = cuflash.merge_states(*odd, *odd)
    for a, b in zip(merged, plain, strict=True):
        assert_bitwise(a, b, "merged")
