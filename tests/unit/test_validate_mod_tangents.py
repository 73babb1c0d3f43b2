"""The text of every error about tangents of mod_arrays."""

import numpy as np
import pytest

import cuflash
from cuflash.errors import DTypeError, ShapeError, ValueRangeError

Q = np.zeros((4, 8), np.float32)
ARRAYS = {"t": np.zeros(3, np.float32), "i": np.zeros(3, np.int32)}
T = ARRAYS["t"]
ERRORS = {
    "another name": ({"u": T}, ValueRangeError, "mod_dots['u'] is given, "
                     "expected the tangent of an array of mod_arrays: "
                     "mod_arrays['i'], mod_arrays['t']"),
    "integers": ({"i": ARRAYS["i"]}, DTypeError, "mod_dots['i'] is given for "
                 "an array of dtype int32: only floating-point arrays move"),
    "dtype": ({"t": T.astype(float)}, DTypeError, "mod_dots['t'] has dtype "
              "float64, expected float32 as mod_arrays['t']: each has the "
              "dtype of what it moves"),
    "shape": ({"t": np.zeros(4, np.float32)}, ShapeError, "mod_dots['t'] has "
              "shape (4,), expected (3,) as mod_arrays['t'] has (3,): q_dot "
              "has one direction"),
    "directions": ({"t": np.zeros((2, 3), np.float32)}, ShapeError,
                   "mod_dots['t'] has shape (2, 3), expected (3,) as "
                   "mod_arrays['t'] has (3,): q_dot has one direction"),
    "a number": ({"t": 1.0}, DTypeError, "mod_dots['t'] is 1.0 of type "
                 "float, expected an array"),
    "a list": ([1], DTypeError, "mod_dots is of type list, expected a dict "
               "from names of arrays of mod_arrays to their tangents"),
}  # fmt: skip


def read(score, b, h, q_idx, kv_idx, *, t, i):
    return score + t[i[kv_idx]]


def seen(b, h, q_idx, kv_idx, *, t):
    return t[kv_idx] > 0


@pytest.mark.parametrize("name", ERRORS)
def test_of_a_jvp(name):
    dots, kind, text = ERRORS[name]
    options = {"score_mod": read, "mod_arrays": ARRAYS, "mod_dots": dots}
    with pytest.raises(kind) as caught:
        cuflash.jvp(Q, Q, Q, Q, None, None, **options)
    assert str(caught.value) == text


def test_a_mask_alone_moves_with_nothing():
    options = {"mask_mod": seen, "mod_arrays": {"t": T}}
    with pytest.raises(ValueRangeError, match="given without score_mod"):
        cuflash.jvp(Q, Q, Q, Q, None, None, mod_dots={"t": T}, **options)


@pytest.mark.parametrize("wanted", [("u",), "t", ("i",)])
def test_of_second_gradients(wanted):
    options = {"score_mod": read, "mod_arrays": ARRAYS}
    out, lse = cuflash.forward(Q, Q, Q, return_lse=True, **options)
    with pytest.raises((ValueRangeError, DTypeError), match="return_d2mod"):
        cuflash.double_backward(
            Q, None, None, Q, Q, Q, Q, out, lse, return_d2mod=wanted,
            **options,
        )  # fmt: skip
