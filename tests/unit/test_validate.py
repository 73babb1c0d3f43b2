"""The text of every error, for every argument of every call."""

from fractions import Fraction
from types import SimpleNamespace

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
from cuflash.request import checks
from cuflash.request.validate import attention as validate
from cuflash.request.validate import devices, memory, shapes
from helpers.checked_by import check
from helpers.compare import assert_all

SHAPES = {
    "q": (2, 5, 4, 8),
    "k": (2, 7, 2, 8),
    "v": (2, 7, 2, 6),
    "out": (2, 5, 4, 6),
    "dout": (2, 5, 4, 6),
    "lse": (2, 4, 5),
    "out_a": (2, 5, 4, 6),
    "lse_a": (2, 4, 5),
    "out_b": (2, 5, 4, 6),
    "lse_b": (2, 4, 5),
}
ARGUMENTS = {
    "forward": ("q", "k", "v"),
    "backward": ("dout", "q", "k", "v", "out", "lse"),
    "merge_states": ("out_a", "lse_a", "out_b", "lse_b"),
}
EVERY = [(call, name) for call, names in ARGUMENTS.items() for name in names]
EVERY_AND_OUT = [*EVERY, ("forward", "out")]

every_argument = pytest.mark.parametrize(("call", "name"), EVERY)
every_argument_and_out = pytest.mark.parametrize(
    ("call", "name"), EVERY_AND_OUT
)


def zeros(name, dtype=np.float32):
    return np.zeros(SHAPES[name], dtype)


def good(call):
    return {name: zeros(name) for name in ARGUMENTS[call]}


def run(call, arrays):
    """Call with arrays by name; merge_states takes more of them by place."""
    if call == "merge_states":
        return cuflash.merge_states(*arrays.values())
    return getattr(cuflash, call)(**arrays)


def complaint(error, call, **changed):
    """Return the text of the error that a good call, changed, raises."""
    arrays = {**good(call), **changed}
    with pytest.raises(CuflashError) as caught:
        run(call, arrays)
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("call", ARGUMENTS)
def test_the_base_call_is_valid(call):
    run(call, good(call))


# No array at all -----------------------------------------------------------

NO_ARRAYS = [
    (None, "NoneType"),
    ("text", "str"),
    (np.float32(1), "numpy.float32"),
]


@every_argument
@pytest.mark.parametrize(("value", "kind"), NO_ARRAYS)
def test_no_array(call, name, value, kind):
    assert complaint(DTypeError, call, **{name: value}) == (
        f"{name} is of type {kind}, expected an array: NumPy, CuPy, or any "
        "with DLPack or __cuda_array_interface__ on a CUDA device"
    )


@pytest.mark.parametrize("given", [[[1.0]], ((1.0,),)])
@every_argument_and_out
def test_a_list(call, name, given):
    assert complaint(DTypeError, call, **{name: given}) == (
        f"{name} is of type {type(given).__name__}, expected an array: pass "
        f"np.asarray({name}), or of arrays on a CUDA device "
        f"cupy.asarray({name})"
    )


def test_out_that_is_no_array():
    text = complaint(DTypeError, "forward", out=0.0)
    assert text == (
        "out is 0.0 of type float, expected an array: pass one of its shape, "
        "such as np.full(shape, 0.0)"
    )


def test_arguments_in_another_order():
    q, k, v, out, lse, dout = (
        zeros(x) for x in ("q", "k", "v", "out", "lse", "dout")
    )
    with pytest.raises(ShapeError, match="the order is dout, q, k, v, out"):
        cuflash.backward(q, k, v, out, lse, dout)
    with pytest.raises(ShapeError, match="as forward returns it with return_"):
        cuflash.merge_states(out, out)
    turned = lse.swapaxes(1, 2)
    with pytest.raises(ShapeError, match=r": pass lse.swapaxes\(-1, -2\)$"):
        cuflash.backward(dout, q, k, v, out, turned)


def test_states_that_are_no_pairs():
    out, lse = zeros("out"), zeros("lse")
    with pytest.raises(DTypeError, match="got 3 arrays, expected out_a, lse"):
        cuflash.merge_states(out, lse, out)
    with pytest.raises(DTypeError, match=r"write merge_states\(\*a, \*b\)"):
        cuflash.merge_states((out, lse), (out, lse))


@every_argument_and_out
def test_masked_array(call, name):
    masked = np.ma.zeros(SHAPES[name], np.float32)
    assert complaint(UnsupportedError, call, **{name: masked}) == (
        f"{name} is a numpy.ma.MaskedArray, expected a plain array: its "
        f"mask would be ignored (pass {name}.filled(0), and hide keys with "
        "mask)"
    )


# On another device -----------------------------------------------------------


class OnDevice:
    """Another library's array with only DLPack's device."""

    def __init__(self, device_type):
        self.device_type = device_type

    def __dlpack_device__(self):
        return self.device_type, 0


class CudaArray:
    """An array with only __cuda_array_interface__."""

    __cuda_array_interface__ = {"data": (0, True)}


@every_argument_and_out
def test_another_library_on_the_cpu(call, name):
    text = complaint(UnsupportedError, call, **{name: OnDevice(1)})
    assert text == (
        f"{name} is a test_validate.OnDevice on the CPU, expected a NumPy "
        "array or an array on a CUDA device (pass "
        f"np.from_dlpack({name}))"
    )


def test_another_kind_of_gpu():
    assert complaint(UnsupportedError, "forward", k=OnDevice(8)) == (
        "k is a test_validate.OnDevice on DLPack device type 8, expected a "
        "NumPy array or an array on a CUDA device"
    )


def test_a_device_that_dlpack_does_not_know():
    text = complaint(UnsupportedError, "forward", k=OnDevice("meta"))
    assert text.startswith(
        "k is a test_validate.OnDevice on a device that DLPack does not know"
    )


def test_a_tensor_that_requires_grad():
    tensor = OnDevice(2)
    tensor.requires_grad = True
    assert complaint(UnsupportedError, "forward", q=tensor) == (
        "q is a test_validate.OnDevice that requires grad, expected one that "
        "does not: for automatic differentiation write "
        "cuflash.torch.attention (or pass q.detach() and call "
        "cuflash.backward)"
    )


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_a_view_of_torch_that_memory_does_not_show(bit):
    tensor = OnDevice(2)
    tensor.is_neg = lambda: bit == "neg"
    tensor.is_conj = lambda: bit == "conj"
    found = complaint(UnsupportedError, "forward", q=tensor)
    assert f"view that {bit}" in found
    assert found.endswith(f"(pass q.resolve_{bit}())")


@every_argument_and_out
@pytest.mark.parametrize("array", [OnDevice(2), OnDevice(13), CudaArray()])
def test_numpy_and_cuda_mixed(call, name, array):
    names = list(dict.fromkeys([*ARGUMENTS[call], name]))
    kind = f"test_validate.{type(array).__name__}"
    text = complaint(DTypeError, call, **{name: array})
    if name == names[0]:
        start = f"{names[1]} is a NumPy array, expected a CUDA array as {name}"
    else:
        start = f"{name} is a CUDA array, expected a NumPy array as {names[0]}"
    each = ", ".join(
        f"{other} {kind if other == name else 'numpy.ndarray'}"
        for other in names
    )
    assert text == (
        f"{start} is: a call runs on one device and moves no array ({each})"
    )


@pytest.mark.parametrize("array", [OnDevice(2), OnDevice(13), CudaArray()])
def test_arrays_on_a_cuda_device_are_known(array):
    assert devices.device_of(q=array, k=OnDevice(2)) == "cuda"


class OnGpu:
    """The attributes of CuPy arrays that the checks read."""

    def __init__(self, array, device=0):
        self.shape, self.strides = array.shape, array.strides
        self.dtype, self.ndim, self.size = array.dtype, array.ndim, array.size
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=device)


@every_argument
def test_two_cuda_devices(call, name):
    arrays = {
        other: OnGpu(zeros(other), device=int(other == name))
        for other in ARGUMENTS[call]
    }
    with pytest.raises(ValueRangeError) as caught:
        check(call, **arrays)
    first = {"backward": "q", "forward": "q", "merge_states": "out_a"}[call]
    after = {"q": "k", "out_a": "lse_a"}.get(name)
    who, got, other = (after, 0, 1) if name == first else (name, 1, 0)
    assert str(caught.value) == (
        f"{who} is on CUDA device {got}, expected device {other} as {first} "
        "is: a call runs on one device and moves no array"
    )


# Dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [("forward", "q"), ("backward", "q"), ("merge_states", "out_a")],
)
@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_dtype_that_no_kernel_has(call, name, dtype):
    text = complaint(DTypeError, call, **{name: zeros(name, dtype)})
    assert text == (
        f"{name} has dtype {dtype}, expected float16, bfloat16, float32 or "
        "float64"
    )


UNLIKE = [
    ("forward", "k", "q"),
    ("forward", "v", "q"),
    ("forward", "out", "q"),
    ("backward", "dout", "q"),
    ("backward", "k", "q"),
    ("backward", "v", "q"),
    ("backward", "out", "q"),
    ("merge_states", "out_b", "out_a"),
]


@pytest.mark.parametrize(("call", "name", "other"), UNLIKE)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_dtype_unlike_the_others(call, name, other, dtype):
    text = complaint(DTypeError, call, **{name: zeros(name, dtype)})
    assert text == (
        f"{name} has dtype {dtype}, expected float32 as in {other}: arrays "
        "of one call have one dtype"
    )


LSES = [
    ("backward", "lse", "q"),
    ("merge_states", "lse_a", "out_a"),
    ("merge_states", "lse_b", "out_a"),
]


@pytest.mark.parametrize(("call", "name", "other"), LSES)
@pytest.mark.parametrize(
    ("dtype", "wrong", "right"),
    [
        ("float16", "float16", "float32"),
        ("float32", "float64", "float32"),
        ("float64", "float32", "float64"),
    ],
)
def test_dtype_of_lse(call, name, other, dtype, wrong, right):
    arrays = {x: zeros(x, dtype) for x in ARGUMENTS[call]}
    arrays |= {x: zeros(x, right) for x in arrays if x.startswith("lse")}
    arrays[name] = zeros(name, wrong)
    assert complaint(DTypeError, call, **arrays) == (
        f"{name} has dtype {wrong}, expected {right} as {other} has dtype "
        f"{dtype}: lse is float32, and float64 for float64 arrays"
    )


# Ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [("forward", "q"), ("backward", "q"), ("merge_states", "out_a")],
)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((), "0 axes"), ((8,), "1 axis"), ((1, 2, 5, 4, 8), "5 axes")],
)
def test_rank_of_no_layout(call, name, shape, axes):
    text = complaint(ShapeError, call, **{name: np.zeros(shape, np.float32)})
    assert text == (
        f"{name} has {axes}, expected 2, 3 or 4 ({name} {shape}; layout is "
        "(seqlen, head_dim), (seqlen, heads, head_dim) or (batch, seqlen, "
        "heads, head_dim))"
    )


@pytest.mark.parametrize(("call", "name", "other"), UNLIKE)
def test_rank_unlike_the_others(call, name, other):
    array = zeros(name)[0]
    text = complaint(ShapeError, call, **{name: array})
    shapes = f"{other} {SHAPES[other]}, {name} {array.shape}"
    assert text == (
        f"{name} has 3 axes, expected 4 as {other} has 4 ({shapes}; layout "
        "is (batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize(("call", "name", "other"), LSES)
def test_rank_of_lse(call, name, other):
    array = zeros(name)[..., None]
    text = complaint(ShapeError, call, **{name: array})
    assert text == (
        f"{name} has 4 axes, expected 3 as {other} has 4 ({other} "
        f"{SHAPES[other]}, {name} {array.shape}; layout is (batch, seqlen, "
        f"heads, head_dim), of {name} (batch, heads, seqlen))"
    )


# Sizes -----------------------------------------------------------------------

# (call, argument, its shape, the start of the message, who is compared)
SIZES = [
    ("forward", "k", (3, 7, 2, 8), "batch 3, expected 2", "q"),
    ("forward", "k", (2, 7, 2, 4), "head_dim 4, expected 8", "q"),
    ("forward", "v", (3, 7, 2, 6), "batch 3, expected 2", "k"),
    ("forward", "v", (2, 9, 2, 6), "seqlen 9, expected 7", "k"),
    ("forward", "v", (2, 7, 1, 6), "heads 1, expected 2", "k"),
    ("forward", "out", (1, 5, 4, 6), "batch 1, expected 2", "q"),
    ("forward", "out", (2, 7, 4, 6), "seqlen 7, expected 5", "q"),
    ("forward", "out", (2, 5, 2, 6), "heads 2, expected 4", "q"),
    ("forward", "out", (2, 5, 4, 8), "head_dim 8, expected 6", "v"),
    ("backward", "k", (3, 7, 2, 8), "batch 3, expected 2", "q"),
    ("backward", "k", (2, 7, 2, 4), "head_dim 4, expected 8", "q"),
    ("backward", "v", (2, 9, 2, 6), "seqlen 9, expected 7", "k"),
    ("backward", "v", (2, 7, 1, 6), "heads 1, expected 2", "k"),
    ("backward", "out", (1, 5, 4, 6), "batch 1, expected 2", "q"),
    ("backward", "out", (2, 7, 4, 6), "seqlen 7, expected 5", "q"),
    ("backward", "out", (2, 5, 2, 6), "heads 2, expected 4", "q"),
    ("backward", "out", (2, 5, 4, 8), "head_dim 8, expected 6", "v"),
    ("backward", "dout", (1, 5, 4, 6), "batch 1, expected 2", "q"),
    ("backward", "dout", (2, 7, 4, 6), "seqlen 7, expected 5", "q"),
    ("backward", "dout", (2, 5, 2, 6), "heads 2, expected 4", "q"),
    ("backward", "dout", (2, 5, 4, 8), "head_dim 8, expected 6", "v"),
    ("merge_states", "out_b", (1, 5, 4, 6), "batch 1, expected 2", "out_a"),
    ("merge_states", "out_b", (2, 7, 4, 6), "seqlen 7, expected 5", "out_a"),
    ("merge_states", "out_b", (2, 5, 2, 6), "heads 2, expected 4", "out_a"),
    ("merge_states", "out_b", (2, 5, 4, 8), "head_dim 8, expected 6", "out_a"),
]


@pytest.mark.parametrize(("call", "name", "shape", "said", "other"), SIZES)
def test_size(call, name, shape, said, other):
    text = complaint(ShapeError, call, **{name: np.zeros(shape, np.float32)})
    assert text == (
        f"{name} has {said} as in {other} ({other} {SHAPES[other]}, {name} "
        f"{shape}; layout is (batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize(("call", "name", "other"), LSES)
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 4, 5), "batch 1, expected 2"),
        ((2, 5, 5), "heads 5, expected 4"),
        ((2, 4, 7), "seqlen 7, expected 5"),
    ],
)
def test_size_of_lse(call, name, other, shape, said):
    text = complaint(ShapeError, call, **{name: np.zeros(shape, np.float32)})
    assert text == (
        f"{name} has {said} as in {other} ({other} {SHAPES[other]}, {name} "
        f"{shape}; layout is (batch, seqlen, heads, head_dim), of {name} "
        "(batch, heads, seqlen))"
    )


def test_a_message_names_the_axis_and_the_shapes():
    q, k = np.zeros((2, 512, 8, 128)), np.zeros((2, 512, 2, 64))
    with pytest.raises(ShapeError) as caught:
        cuflash.forward(q, k, k)
    assert str(caught.value) == (
        "k has head_dim 64, expected 128 as in q (q (2, 512, 8, 128), k (2, "
        "512, 2, 64); layout is (batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize(
    ("q", "k", "layout"),
    [
        ((5, 4, 8), (7, 2, 9), "(seqlen, heads, head_dim)"),
        ((5, 8), (7, 9), "(seqlen, head_dim)"),
    ],
)
def test_the_message_shows_the_layout_that_was_used(q, k, layout):
    with pytest.raises(ShapeError) as caught:
        cuflash.forward(np.zeros(q), np.zeros(k), np.zeros(k))
    assert str(caught.value) == (
        f"k has head_dim 9, expected 8 as in q (q {q}, k {k}; layout is "
        f"{layout})"
    )


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_cannot_be_grouped(call, heads):
    k, v = np.zeros((2, 7, heads, 8)), np.zeros((2, 7, heads, 6))
    arrays = {"k": k.astype(np.float32), "v": v.astype(np.float32)}
    assert complaint(ShapeError, call, **arrays) == (
        f"q has heads 4, expected a multiple of k's {heads}: each key head "
        "serves a group of query heads of the same size (q (2, 5, 4, 8), k "
        f"(2, 7, {heads}, 8); layout is (batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize(
    ("q", "k", "cure"),
    [
        ((2, 4, 9, 8), (2, 2, 7, 8), "q.swapaxes(1, 2) and so on"),
        ((4, 9, 8), (2, 7, 8), "q.swapaxes(0, 1) and so on"),
        ((2, 1, 4, 8), (2, 2, 7, 8), "k.swapaxes(1, 2)"),
    ],
)
def test_heads_before_tokens(q, k, cure):
    with pytest.raises(ShapeError) as caught:
        cuflash.forward(np.zeros(q), np.zeros(k), np.zeros(k))
    text = str(caught.value)
    assert f"): pass heads after tokens, {cure}, if they are before" in text


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize(
    ("width", "error", "said"),
    [
        (577, UnsupportedError, "at most 576: no kernel supports wider rows"),
        (0, ShapeError, "at least 1"),
    ],
)
def test_head_dim_out_of_range(call, width, error, said):
    q, k = np.zeros((2, 5, 4, width)), np.zeros((2, 7, 2, width))
    arrays = {"q": q.astype(np.float32), "k": k.astype(np.float32)}
    assert complaint(error, call, **arrays) == (
        f"q has head_dim {width}, expected {said} (q {q.shape}; layout is "
        "(batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize(
    ("width", "error", "said"),
    [
        (513, UnsupportedError, "at most 512: no kernel supports wider rows"),
        (0, ShapeError, "at least 1"),
    ],
)
def test_head_dim_v_out_of_range(width, error, said):
    v = np.zeros((2, 7, 2, width), np.float32)
    out = np.zeros((2, 5, 4, width), np.float32)
    place = f"({{}} {{}}; layout is {shapes._LAYOUTS[4]})"
    start = f"{{}} has head_dim {width}, expected {said} "
    want = (start + place).format
    assert complaint(error, "forward", v=v) == want("v", "v", v.shape)
    assert complaint(error, "backward", v=v, out=out, dout=out) == want(
        "v", "v", v.shape
    )
    assert complaint(error, "merge_states", out_a=out, out_b=out) == want(
        "out_a", "out_a", out.shape
    )


# Counted in int32 ------------------------------------------------------------

MAX_LENGTH = 2_147_482_623


def without_memory(shape, dtype=np.float32):
    return np.broadcast_to(np.zeros((), dtype), shape)


def calls_with(**sizes):
    """Return each call's arrays with changed sizes, all of stride 0."""
    s = {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads": 1, **sizes}
    q, k = (
        without_memory((s["batch"], s[f"seqlen_{x}"], s["heads"], 1))
        for x in "qk"
    )
    lse = without_memory((s["batch"], s["heads"], s["seqlen_q"]))
    return {
        "forward": (q, k, k),
        "backward": (q, q, k, k, q, lse),
        "merge_states": (q, lse, q, lse),
    }


@pytest.mark.parametrize("call", ARGUMENTS)
@pytest.mark.parametrize("name", ["batch", "seqlen_q", "heads"])
def test_size_that_a_kernel_cannot_count(call, name):
    arrays = calls_with(**{name: MAX_LENGTH + 1})[call]
    first = "out_a" if call == "merge_states" else "q"
    with pytest.raises(UnsupportedError) as caught:
        getattr(cuflash, call)(*arrays)
    assert str(caught.value) == (
        f"{first} has {name.partition('_')[0]} 2147482624, expected at most "
        "2147482623: kernels count in 32-bit integers, up to the end of the "
        f"last tile, which may be 1024 past the array's ({first} "
        f"{arrays[0].shape}; layout is (batch, seqlen, heads, head_dim))"
    )


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_keys_that_a_kernel_cannot_count(call):
    with pytest.raises(UnsupportedError, match="^k has seqlen 2147482624, "):
        getattr(cuflash, call)(*calls_with(seqlen_k=MAX_LENGTH + 1)[call])


@pytest.mark.parametrize("call", ARGUMENTS)
def test_heads_of_all_batches_that_a_kernel_cannot_count(call):
    with pytest.raises(UnsupportedError, match=r"batch \* heads 4294967296,"):
        getattr(cuflash, call)(*calls_with(batch=2**16, heads=2**16)[call])


@pytest.mark.parametrize("call", ARGUMENTS)
@pytest.mark.parametrize("name", ["batch", "seqlen_q", "seqlen_k", "heads"])
def test_the_largest_size_that_a_kernel_can_count(call, name):
    arrays = calls_with(**{name: MAX_LENGTH})[call]
    check(call, **dict(zip(ARGUMENTS[call], arrays, strict=True)))


# Options ---------------------------------------------------------------------

both_directions = pytest.mark.parametrize("call", ["forward", "backward"])


@both_directions
@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ("1", "'1' of type str"),
        (True, "True of type bool"),
        (1j, "1j of type complex"),
        ([1.0], "of type list"),
    ],
)
def test_scale_that_is_no_number(call, scale, said):
    assert complaint(DTypeError, call, scale=scale) == (
        f"scale is {said}, expected a real number, or None for "
        "head_dim ** -0.5"
    )


SCALED = "pass scale=1 and q * scale"


@both_directions
@pytest.mark.parametrize(
    ("scale", "cure"),
    [
        (np.ones(()), f"pass scale.item(); if it has a gradient, {SCALED}"),
        (np.ones(4), SCALED),
    ],
)
def test_scale_that_is_an_array(call, scale, cure):
    assert complaint(DTypeError, call, scale=scale) == (
        "scale is of type numpy.ndarray, expected a real number, or None for "
        f"head_dim ** -0.5: {cure}"
    )


def test_arrays_of_one_number_name_the_cure():
    text = complaint(DTypeError, "forward", softcap=np.ones(()))
    assert text.endswith("expected a real number (pass softcap.item())")
    text = complaint(DTypeError, "forward", causal=np.ones((), bool))
    assert text.endswith("expected True or False (pass causal.item())")
    with pytest.raises(DTypeError, match=r"an int \(pass n.item\(\)\)$"):
        checks.whole("n", np.ones(1, int), 0, 5)


@both_directions
@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (np.float32("nan"), "nan"),
        (10**400, "1" + "0" * 400),
    ],
)
def test_scale_that_is_not_finite(call, scale, said):
    assert complaint(ValueRangeError, call, scale=scale) == (
        f"scale is {said}, expected a finite number: it multiplies every score"
    )


@both_directions
def test_scale_beyond_float32(call):
    assert complaint(ValueRangeError, call, scale=-1e39) == (
        "scale is -1e+39, expected at most 1e+38 in magnitude: scores of "
        "float32 arrays are float32"
    )


@pytest.mark.parametrize(
    "scale", [0, 0.0, -0.25, 1e38, np.float16(2), np.int64(3), Fraction(1, 3)]
)
def test_scale_may_be_any_real_number(scale):
    call = validate.forward(**good("forward"), scale=scale)
    assert call.problem.scale == float(scale)
    assert type(call.problem.scale) is float


def test_scale_of_float64_arrays_may_be_larger():
    arrays = {name: zeros(name, np.float64) for name in ("q", "k", "v")}
    assert validate.forward(**arrays, scale=1e300).problem.scale == 1e300


@both_directions
@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize(
    ("block", "said"),
    [
        (True, "True of type bool"),
        (64.0, "64.0 of type float"),
        ("64", "'64' of type str"),
        ((64, 64), "of type tuple"),
    ],
)
def test_block_that_is_no_int(call, name, block, said):
    assert complaint(DTypeError, call, **{name: block}) == (
        f"{name} is {said}, expected an int, or None for the tuned size"
    )


@both_directions
@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize("block", [0, -64])
def test_block_out_of_range(call, name, block):
    assert complaint(ValueRangeError, call, **{name: block}) == (
        f"{name} is {block}, expected at least 1: it counts the tokens of a "
        "tile"
    )


@both_directions
@pytest.mark.parametrize("precision", ["tf32", 3, True, ("tf32x3",)])
def test_precision_that_is_none(call, precision):
    said = complaint(ValueRangeError, call, precision=precision)
    assert said.startswith("precision is ")
    assert said.endswith(
        ", expected 'tf32x3', or None for the precision of the dtype"
    )


@both_directions
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_precision_of_another_dtype(call, dtype):
    wide = np.float64 if dtype == "float64" else np.float32
    arrays = {
        name: zeros(name, wide if name == "lse" else dtype)
        for name in ARGUMENTS[call]
    }
    said = complaint(UnsupportedError, call, **arrays, precision="tf32x3")
    assert said == (
        "precision is 'tf32x3', which is for float32 arrays, got "
        f"{dtype}: leave it out, or convert q, k and v to float32"
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("forward", "causal"),
        ("forward", "return_lse"),
        ("backward", "causal"),
        ("backward", "deterministic"),
    ],
)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (1, "1 of type int"),
        (None, "of type NoneType"),
        ("yes", "'yes' of type str"),
        (np.ones(2, bool), "of type numpy.ndarray"),
    ],
)
def test_flag_that_is_no_bool(call, name, flag, said):
    assert complaint(DTypeError, call, **{name: flag}) == (
        f"{name} is {said}, expected True or False"
    )


# out= ------------------------------------------------------------------------


def test_out_that_is_read_only():
    out = zeros("out")
    out.flags.writeable = False
    assert complaint(ValueRangeError, "forward", out=out) == (
        "out is read-only (numpy.ndarray (2, 5, 4, 6)), expected a writable "
        "array: it receives the result"
    )


def test_out_that_is_read_only_on_a_cuda_device():
    class Constant:
        """Implements the protocol, without a shape."""

        __cuda_array_interface__ = {"data": (256, True), "shape": (5, 8)}

    out = Constant()
    with pytest.raises(ValueRangeError, match="^out is read-only") as caught:
        cuflash.forward(CudaArray(), CudaArray(), CudaArray(), out=out)
    assert "Constant (5, 8))" in str(caught.value)


def test_out_that_does_not_say_whether_it_is_read_only():
    """PyTorch raises KeyError for dtypes without the interface."""

    class Tensor:
        @property
        def __cuda_array_interface__(self):
            raise KeyError("bfloat16")

    devices.writable("out", Tensor())


@pytest.mark.parametrize("wrap", [np.asarray, OnGpu])
def test_overlap_is_seen_on_either_device(wrap):
    packed = np.zeros((2, 5, 4, 4, 8), np.float16)
    q, k, v, out = (wrap(x) for x in np.moveaxis(packed, 2, 0))
    arrays = {"q": q, "k": k, "v": v}
    memory.check_apart({"out": out}, arrays)
    with pytest.raises(ValueRangeError, match="out shares memory with v"):
        memory.check_apart({"out": wrap(packed[:, :, 2, 1:])}, arrays)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps_an_input(name):
    memory = np.zeros(1000, np.float32)
    array, out = zeros(name), zeros("out")
    array = memory[: array.size].reshape(array.shape)
    out = memory[array.size - 1 :][: out.size].reshape(out.shape)
    text = complaint(ValueRangeError, "forward", **{name: array}, out=out)
    assert text == (
        f"out shares memory with {name}, expected separate memory: {name} "
        "is read while out is written"
    )


def test_out_between_the_inputs_is_fine():
    """All four are views of one array: bounds overlap, elements do not."""
    packed = np.ones((2, 5, 4, 4, 8), np.float32)
    q, k, v, out = np.moveaxis(packed, 2, 0)
    cuflash.forward(q, k, v, out=out)
    assert_all(packed[:, :, :3], 1, "packed[:, :, :3]")


@pytest.mark.parametrize(
    "strides", [(0, 96, 24, 4), (480, 96, 24, 0), (480, 92, 24, 4)]
)
def test_out_that_overlaps_itself(strides):
    memory = np.zeros(240, np.float32)
    out = np.ndarray(SHAPES["out"], np.float32, memory, strides=strides)
    assert complaint(ValueRangeError, "forward", out=out) == (
        "out has elements that share memory with each other (shape "
        f"(2, 5, 4, 6), strides {strides} bytes), expected a separate "
        "address for each"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": 1},
        {"return_lse": 1},
        {"scale": float("nan")},
        {"block_q": 0},
        {"block_k": 1.0},
        {"k": np.zeros((2, 7, 2, 4), np.float32)},
        {"v": [0.0]},
    ],
)
def test_nothing_is_written_before_every_check_passed(changed):
    out = np.full(SHAPES["out"], 7, np.float32)
    with pytest.raises(CuflashError):
        cuflash.forward(**{**good("forward"), "out": out, **changed})
    assert_all(out, 7, "out")


# The errors are what their names say, for who catches Python's own -----------


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (ShapeError, ValueError),
        (ValueRangeError, ValueError),
        (DTypeError, TypeError),
        (UnsupportedError, NotImplementedError),
        (cuflash.CompileError, RuntimeError),
    ],
)
def test_parents(error, parent):
    assert issubclass(error, CuflashError) and issubclass(error, parent)
