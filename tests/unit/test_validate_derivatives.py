"""The text of every error about tangents and cotangents."""

import numpy as np
import pytest

import cuflash
from cuflash.backends.numpy.attention import jvp as numpy_jvp
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.request.problem import Tangents
from cuflash.request.validate import derivatives as validate_derivatives

SHAPES = {
    "q": (2, 5, 4, 8),
    "k": (2, 7, 2, 8),
    "v": (2, 7, 2, 6),
    "dout": (2, 5, 4, 6),
    "out": (2, 5, 4, 6),
    "lse": (2, 4, 5),
    "bias": (4, 5, 7),
    "sink": (4,),
}
OPTIONS = "bias", "sink"
JVP = {
    "q_dot": "q", "k_dot": "k", "v_dot": "v", "bias_dot": "bias",
    "sink_dot": "sink",
}  # fmt: skip
DOUBLE = {
    "ddq": "q", "ddk": "k", "ddv": "v", "ddbias": "bias", "ddsink": "sink",
}  # fmt: skip
ALL = [*JVP, *DOUBLE]
each_tangent = pytest.mark.parametrize("name", JVP)
each_cotangent = pytest.mark.parametrize("name", DOUBLE)
each_of_both = pytest.mark.parametrize("name", ALL)


def zeros(name, lead=(), dtype=np.float32):
    of = (JVP | DOUBLE).get(name, name)
    return np.zeros((*lead, *SHAPES[of]), dtype)


def good(names, of, **changed):
    given = {name: zeros(name) for name in (*names, *OPTIONS, *of)}
    return given | changed


def call(name, **changed):
    """Call jvp for a tangent's name, double_backward for a cotangent's."""
    if name in JVP:
        return cuflash.jvp(**good("qkv", JVP, **changed))
    names = "q", "k", "v", "dout", "out", "lse"
    return cuflash.double_backward(**good(names, DOUBLE, **changed))


def complaint(error, name, **changed):
    """Return the text of the error that a good call, changed, raises."""
    with pytest.raises(CuflashError) as caught:
        call(name, **changed)
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("name", ["q_dot", "ddq"])
def test_all_together_are_valid(name):
    assert len(call(name)) == (2 if name in JVP else 4)


@each_of_both
def test_none_is_valid(name):
    call(name, **{name: None})


def test_several_directions_are_valid():
    moves = {name: zeros(name, (3,)) for name in JVP}
    out, out_dot = call("q_dot", **moves)
    assert out_dot.shape == (3, *out.shape)


@each_of_both
def test_no_array(name):
    text = complaint(DTypeError, name, **{name: [0.0]})
    assert text.startswith(f"{name} is of type list, expected an array: pass")


@each_of_both
def test_on_another_device(name):
    class CudaArray:
        __cuda_array_interface__ = {"data": (256, False), "shape": (5,)}

    text = complaint(DTypeError, name, **{name: CudaArray()})
    assert text.startswith(f"{name} is a CUDA array, expected a NumPy array")


@each_of_both
def test_requires_grad(name):
    class Tensor:
        requires_grad = True

    text = complaint(UnsupportedError, name, **{name: Tensor()})
    assert f"pass {name}.detach()" in text


@each_of_both
def test_dtype(name):
    what = (JVP | DOUBLE)[name]
    wrong = zeros(name, dtype=np.float64)
    assert complaint(DTypeError, name, **{name: wrong}) == (
        f"{name} has dtype float64, expected float32 as {what}: each has the "
        "dtype of what it moves"
    )


@each_cotangent
def test_shape_of_a_cotangent(name):
    what = DOUBLE[name]
    for wrong in (zeros(name, (1,)), zeros(name)[..., :-1]):
        assert complaint(ShapeError, name, **{name: wrong}) == (
            f"{name} has shape {wrong.shape}, expected {SHAPES[what]} as "
            f"{what} has {SHAPES[what]}"
        )


def test_shape_of_the_first_tangent():
    assert complaint(ShapeError, "q_dot", q_dot=zeros("q_dot")[1:]) == (
        "q_dot has shape (1, 5, 4, 8), expected (2, 5, 4, 8) as q has "
        "(2, 5, 4, 8), or (n, 2, 5, 4, 8) for n directions at once"
    )


@each_tangent
def test_shape_of_a_tangent_of_several_directions(name):
    what, moves = JVP[name], {x: zeros(x, (3,)) for x in JVP}
    moves[name] = moves[name][..., :-1]
    text = complaint(ShapeError, name, **moves)
    like = "" if name == "q_dot" else " as q_dot has"
    assert text == (
        f"{name} has shape {moves[name].shape}, expected "
        f"{(3, *SHAPES[what])} as {what} has {SHAPES[what]}, for each of 3 "
        f"directions{like}"
    )


@pytest.mark.parametrize("name", [x for x in JVP if x != "q_dot"])
def test_one_direction_and_several(name):
    what = JVP[name]
    got = complaint(ShapeError, name, **{name: zeros(name, (3,))})
    assert got == (
        f"{name} has shape {(3, *SHAPES[what])}, expected {SHAPES[what]} as "
        f"{what} has {SHAPES[what]}: q_dot has one direction"
    )
    text = complaint(ShapeError, name, q_dot=zeros("q_dot", (3,)))
    assert text.endswith("for each of 3 directions as q_dot has")


def test_numbers_of_directions_differ():
    moves = {x: zeros(x, (3,)) for x in JVP} | {"v_dot": zeros("v", (2,))}
    assert complaint(ShapeError, "v_dot", **moves) == (
        "v_dot has shape (2, 2, 7, 2, 6), expected (3, 2, 7, 2, 6) as v has "
        "(2, 7, 2, 6), for each of 3 directions as q_dot has"
    )


@pytest.mark.parametrize("name", ["bias_dot", "sink_dot", "ddbias", "ddsink"])
def test_without_what_it_moves(name):
    what = (JVP | DOUBLE)[name]
    assert complaint(ValueRangeError, name, **{what: None}) == (
        f"{name} is given without {what}, expected {what} too: it has no "
        "effect alone"
    )


@pytest.mark.parametrize("what", OPTIONS)
def test_asked_without_its_input(what):
    changed = {what: None, f"dd{what}": None, f"return_d2{what}": True}
    assert complaint(ValueRangeError, "ddq", **changed) == (
        f"return_d2{what} is given without {what}, expected {what} too: it "
        "has no effect alone"
    )


@pytest.mark.parametrize(
    "name", ["return_d2bias", "return_d2sink", "return_ddlse"]
)
def test_flags(name):
    text = complaint(DTypeError, "ddq", **{name: 1})
    assert text.startswith(f"{name} is 1 of type int, expected True or")


def test_a_broadcast_bias_in_order():
    changed = {"deterministic": True, "return_d2bias": True}
    text = complaint(UnsupportedError, "ddq", **changed)
    assert text.startswith("deterministic and return_d2bias are both True")


@pytest.mark.parametrize("name", ["k", "v", "out", "dout", "lse"])
def test_other_arrays_are_checked_as_in_backward(name):
    text = complaint(ShapeError, "ddq", **{name: zeros(name)[:1]})
    assert text.startswith(f"{name} has batch 1, expected 2 as in ")


def test_options_are_checked_as_in_forward():
    text = complaint(ShapeError, "q_dot", mask=np.ones((3, 7), bool))
    assert text.startswith("mask has shape (3, 7), expected one that broad")
    text = complaint(ValueRangeError, "ddq", segment_ids_q=np.zeros(5, "i4"))
    assert text.startswith("segment_ids_q is given without segment_ids_k")


@pytest.mark.parametrize("name", ["q_dot", "ddq"])
def test_offsets_are_checked(name):
    arrays = {x: zeros(x)[0] for x in ("q", "k", "v", "dout", "out", "lse")}
    moves = {x: None for x in (JVP if name in JVP else DOUBLE)}
    keep = "qkv" if name in JVP else arrays
    given = {x: arrays[x] for x in keep} | moves | {"bias": None}
    offsets = np.array([0, 9], np.int32)
    text = complaint(ValueRangeError, name, **given, cu_seqlens_q=offsets,
                     cu_seqlens_k=np.array([0, 7], np.int32))  # fmt: skip
    assert (
        text == "cu_seqlens_q[1] is 9, expected at most 5, the number of"
        " tokens"
    )


# Calls ----------------------------------------------------------------------


def test_a_problem_knows_what_moves():
    given = good("qkv", {"v_dot": "v", "sink_dot": "sink"})
    checked = validate_derivatives.jvp(**given)
    assert checked.problem.direction == "jvp"
    assert checked.problem.tangents == Tangents(("v", "sink"), 1)
    again = validate_derivatives.jvp(**given)
    assert again.signature is checked.signature
    assert numpy_jvp(checked)[2].shape == (1, 2, 5, 4, 6)


def test_a_call_holds_directions_in_full_rank():
    arrays = {x: zeros(x)[0, :, 0] for x in "qkv"}
    moves = {f"{x}_dot": np.stack([y, y, y]) for x, y in arrays.items()}
    checked = validate_derivatives.jvp(**arrays, **moves)
    assert checked.signature.several
    assert checked.problem.tangents == Tangents(("q", "k", "v"), 3)
    for name, x in checked.directions.items():
        assert x.shape == checked.signature.tangents[name].shape
        assert x.ndim == 5
    layout = checked.signature.tangents["q"]
    assert layout.shape == (3, 1, 5, 1, 8)


def test_a_broadcast_tangent_of_a_bias_has_its_strides():
    bias = np.zeros((4, 1, 7), np.float32)
    given = good("qkv", {}, bias=bias, bias_dot=np.stack([bias, bias]))
    layout = validate_derivatives.jvp(**given).signature.tangents["bias"]
    assert layout.shape == (2, 2, 4, 5, 7)
    assert layout.strides == (112, 0, 28, 0, 4)


def test_second_gradients_that_are_asked_for():
    names = "q", "k", "v", "dout", "out", "lse"
    wanted = {"return_d2sink": True, "return_ddlse": True}
    given = good(names, DOUBLE) | wanted
    p = validate_derivatives.double_backward(**given).problem
    assert p.return_dsink and p.return_ddlse and not p.return_dbias
    assert p.tangents == Tangents(("q", "k", "v", "bias", "sink"))
    *_, d2sink, ddlse = cuflash.double_backward(**given)
    assert d2sink.shape == (4,) and ddlse.shape == (2, 4, 5)
