"""The text of every error about dlse, and about dq=, dk= and dv=."""

import numpy as np
import pytest

import cuflash
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request.validate import attention as validate
from helpers.compare import assert_all

SHAPES = {
    "dout": (2, 5, 4, 6),
    "q": (2, 5, 4, 8),
    "k": (2, 7, 2, 8),
    "v": (2, 7, 2, 6),
    "out": (2, 5, 4, 6),
    "lse": (2, 4, 5),
}
OF = {"dlse": "lse", "dq": "q", "dk": "k", "dv": "v"}
GRADIENTS = ("dq", "dk", "dv")
each_gradient = pytest.mark.parametrize("name", GRADIENTS)
each_argument = pytest.mark.parametrize("name", OF)


def zeros(name, dtype=np.float32):
    return np.zeros(SHAPES[OF.get(name, name)], dtype)


def good(**changed):
    return {name: zeros(name) for name in SHAPES} | changed


def complaint(error, **changed):
    """Return the text of the error that a good call, changed, raises."""
    with pytest.raises(CuflashError) as caught:
        cuflash.backward(**good(**changed))
    assert caught.type is error
    return str(caught.value)


def test_all_together_are_valid():
    cuflash.backward(**good(), **{name: zeros(name) for name in OF})


@each_argument
def test_no_array(name):
    assert complaint(DTypeError, **{name: [0.0]}) == (
        f"{name} is of type list, expected an array: pass np.asarray({name}),"
        f" or of arrays on a CUDA device cupy.asarray({name})"
    )


@each_argument
def test_on_another_device(name):
    class CudaArray:
        __cuda_array_interface__ = {"data": (256, False), "shape": (5,)}

    text = complaint(DTypeError, **{name: CudaArray()})
    assert text.startswith(
        f"{name} is a CUDA array, expected a NumPy array as dout is"
    )


@each_argument
def test_requires_grad(name):
    class Tensor:
        requires_grad = True

    text = complaint(UnsupportedError, **{name: Tensor()})
    assert f"pass {name}.detach()" in text


def test_dtype_of_dlse():
    assert complaint(DTypeError, dlse=zeros("dlse", np.float64)) == (
        "dlse has dtype float64, expected float32 as q has dtype float32: "
        "lse is float32, and float64 for float64 arrays"
    )


@each_gradient
def test_dtype_of_a_gradient(name):
    assert complaint(DTypeError, **{name: zeros(name, np.float16)}) == (
        f"{name} has dtype float16, expected float32 as in q: arrays of one "
        "call have one dtype"
    )


def test_shape_of_dlse():
    assert complaint(ShapeError, dlse=np.zeros((2, 4, 6), np.float32)) == (
        "dlse has seqlen 6, expected 5 as in q (q (2, 5, 4, 8), dlse "
        "(2, 4, 6); layout is (batch, seqlen, heads, head_dim), of dlse "
        "(batch, heads, seqlen))"
    )


def test_axes_of_dlse():
    text = complaint(ShapeError, dlse=np.zeros((4, 5), np.float32))
    assert text.startswith("dlse has 2 axes, expected 3 as q has 4 ")


@each_gradient
@pytest.mark.parametrize("axis", range(4))
def test_shape_of_a_gradient(name, axis):
    of, named = OF[name], ("batch", "seqlen", "heads", "head_dim")[axis]
    shape = list(SHAPES[of])
    shape[axis] += 1
    text = complaint(ShapeError, **{name: np.zeros(shape, np.float32)})
    assert text.startswith(
        f"{name} has {named} {shape[axis]}, expected {shape[axis] - 1} as in "
        f"{of} ({of} {SHAPES[of]}, {name} {tuple(shape)}; layout is "
    )


@each_gradient
def test_read_only(name):
    array = zeros(name)
    array.flags.writeable = False
    assert complaint(ValueRangeError, **{name: array}) == (
        f"{name} is read-only (numpy.ndarray {array.shape}), expected a "
        f"writable array: it receives the gradient of {OF[name]}"
    )


def test_dlse_may_be_read_only():
    dlse = zeros("dlse")
    dlse.flags.writeable = False
    cuflash.backward(**good(dlse=dlse))


@each_gradient
@pytest.mark.parametrize("other", [*SHAPES, "dlse"])
def test_shares_memory_with_an_input(name, other):
    memory = np.zeros(1000, np.float32)
    array, result = zeros(other), zeros(name)
    array = memory[: array.size].reshape(array.shape)
    result = memory[array.size - 1 :][: result.size].reshape(result.shape)
    assert complaint(ValueRangeError, **{other: array, name: result}) == (
        f"{name} shares memory with {other}, expected separate memory: "
        f"{other} is read while {name} is written"
    )


def test_shares_memory_with_an_option():
    bias = np.zeros((2, 5, 4, 8), np.float32)
    given = {"bias": bias.reshape(2, 4, 5, 8)[..., :7], "dq": bias}
    text = complaint(ValueRangeError, **given)
    assert text.startswith("dq shares memory with bias, expected separate")


@pytest.mark.parametrize(
    ("a", "b"), [("dq", "dk"), ("dq", "dv"), ("dk", "dv")]
)
def test_share_memory_with_each_other(a, b):
    memory = np.zeros(1000, np.float32)
    first, second = (
        memory[: zeros(x).size].reshape(zeros(x).shape) for x in (a, b)
    )
    assert complaint(ValueRangeError, **{a: first, b: second}) == (
        f"{b} shares memory with {a}, expected separate memory: both are "
        "written"
    )


@each_gradient
def test_overlaps_itself(name):
    array = np.broadcast_to(np.zeros(1, np.float32), zeros(name).shape)
    array = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.float32), array.shape, (0, 0, 0, 0)
    )
    text = complaint(ValueRangeError, **{name: array})
    assert text.startswith(f"{name} has elements that share memory with each")


def test_thirds_of_one_array_are_fine():
    """As the gradient of a fused QKV."""
    x = np.ones((2, 5, 4, 8), np.float32)
    lse = np.zeros((2, 4, 5), np.float32)
    fused = np.full((2, 5, 3, 4, 8), np.nan, np.float32)
    dq, dk, dv = np.moveaxis(fused, 2, 0)
    cuflash.backward(x, x, x, x, x, lse, dq=dq, dk=dk, dv=dv)
    assert_all(np.isnan(fused), False, "np.isnan(fused)")


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": 1},
        {"block_k": 1.0},
        {"dlse": np.zeros((2, 4, 4), np.float32)},
        {"dv": np.zeros((2, 7, 2, 5), np.float32)},
        {"lse": [0.0]},
    ],
)
def test_nothing_is_written_before_every_check_passed(changed):
    dq = np.full(SHAPES["q"], 7, np.float32)
    with pytest.raises(CuflashError):
        cuflash.backward(**good(dq=dq) | changed)
    assert_all(dq, 7, "dq")


def test_a_call_holds_them_in_full_rank():
    shapes = {name: shape[1:] for name, shape in SHAPES.items()}
    given = {name: np.zeros(x, np.float32) for name, x in shapes.items()}
    dlse, dk = np.zeros((4, 5), np.float32), np.zeros((7, 2, 8), np.float32)
    call = validate.backward(**given, dlse=dlse, dk=dk)
    assert call.problem.dlse
    assert call.arrays["dlse"].shape == (1, 4, 5)
    assert call.gradients["dk"].shape == (1, 7, 2, 8)
    assert np.shares_memory(call.gradients["dk"], dk)
    assert call.gradients.keys() == {"dk"}
    assert not validate.backward(**given).problem.dlse
