"""What a user's function cannot do: the errors of recording it."""

import enum
import math
import re
import sys

import numpy as np
import pytest

import cuflash
from cuflash.errors import (
    CuflashError,
    DTypeError,
    ExpressionError,
    UnsupportedError,
    ValueRangeError,
)
from cuflash.expressions.trace import MOST_NODES

Q = np.zeros((1, 4, 2, 8), np.float32)
TABLE = np.zeros((2, 3), np.float32)
COUNT = 0


def complaint(error=ExpressionError, mask=None, score=None, **arrays):
    """Return the text of the error of a call with a user's function."""
    given = {"score_mod": score, "mask_mod": mask, "mod_arrays": arrays}
    options = {name: x for name, x in given.items() if x}
    with pytest.raises(CuflashError) as caught:
        cuflash.forward(Q, Q, Q, **options)
    assert caught.type is error
    return str(caught.value)


def first_line(function):
    return function.__code__.co_firstlineno


# Each is one line, so that the line of the fault is the function's.
SCORES = {
    "if": (
        lambda score, b, h, q_idx, kv_idx: score if q_idx > 1 else 0.0,
        "need one truth value", "write np.where(condition, a, b)",
    ),
    "and": (
        lambda score, b, h, q_idx, kv_idx: np.where(b and h, score, 0),
        "need one truth value", "(a < b) & (c < d)",
    ),
    "or": (
        lambda score, b, h, q_idx, kv_idx: np.where(b or h, score, 0),
        "need one truth value", "|",
    ),
    "not": (
        lambda score, b, h, q_idx, kv_idx: np.where(not b, score, 0),
        "need one truth value", "~",
    ),
    "max": (
        lambda score, b, h, q_idx, kv_idx: max(score, q_idx),
        "max()", "np.maximum",
    ),
    "in": (
        lambda score, b, h, q_idx, kv_idx: score * (h in (1, 2)),
        "need one truth value", "np.where",
    ),
    "is": (
        lambda score, b, h, q_idx, kv_idx: score * (q_idx is kv_idx),
        "compares with `is`", "write == or !=",
    ),
    "is, within": (
        lambda score, b, h, q_idx, kv_idx: (lambda: score * (q_idx is h))(),
        "compares with `is`", "write == or !=",
    ),
    "unknown ufunc": (
        lambda score, b, h, q_idx, kv_idx: np.arcsinh(score),
        "np.arcsinh cannot be recorded", "of NumPy's and SciPy's functions",
    ),
    "unknown function": (
        lambda score, b, h, q_idx, kv_idx: np.sinc(score),
        "np.sinc cannot be recorded", "tanh",
    ),
    "math": (
        lambda score, b, h, q_idx, kv_idx: math.exp(score),
        "a function of math", "NumPy's function: np.exp(x)",
    ),
    "method": (
        lambda score, b, h, q_idx, kv_idx: score.cumsum(),
        "no attribute 'cumsum'", "write NumPy's function, np.exp(x)",
    ),
    "narrow int": (
        lambda score, b, h, q_idx, kv_idx: score + (kv_idx * 9).astype("i1"),
        "int8, which wraps, where ints have 64", "write x.astype(int), and x",
    ),
    "unsigned int": (
        lambda score, b, h, q_idx, kv_idx: score * kv_idx.astype(np.uint64),
        "a conversion to uint64", "% 256 or the like",
    ),
    "byte": (
        lambda score, b, h, q_idx, kv_idx: score * kv_idx.byte(),
        "a conversion to uint8", "write x.astype(int)",
    ),
    "reduce": (
        lambda score, b, h, q_idx, kv_idx: np.add.reduce(score),
        "np.add with reduce", "write np.add(a, b)",
    ),
    "keyword": (
        lambda score, b, h, q_idx, kv_idx: np.exp(score, dtype="f4"),
        "np.exp with dtype", "write np.exp(a)",
    ),
    "digits": (
        lambda score, b, h, q_idx, kv_idx: round(score, 2),
        "round() to digits", "write np.rint(x * 100) / 100",
    ),
    "NumPy's digits": (
        lambda score, b, h, q_idx, kv_idx: np.round(score, 2),
        "np.round of 2 values", "expected 1",
    ),
    "condition alone": (
        lambda score, b, h, q_idx, kv_idx: np.where(q_idx > 1),
        "a condition alone", "write np.where(c, a, b)",
    ),
    "bits of a float": (
        lambda score, b, h, q_idx, kv_idx: score & 3,
        "& of a float", "compare first, with parentheses",
    ),
    "power of ints": (
        lambda score, b, h, q_idx, kv_idx: score + q_idx**kv_idx,
        "** of two ints", "x.astype(float) ** y",
    ),
    "complex": (
        lambda score, b, h, q_idx, kv_idx: score * 1j,
        "an operand of * is 1j of type complex", "a traced value or a number",
    ),
    "to complex": (
        lambda score, b, h, q_idx, kv_idx: score.astype(complex),
        "a conversion to complex128", "x.astype(int)",
    ),
    "long int": (
        lambda score, b, h, q_idx, kv_idx: score + 2**63,
        "an operand of + is 9223372036854775808", "an int of 64 bits",
    ),
    "array, read": (
        lambda score, b, h, q_idx, kv_idx: score + TABLE[h, q_idx],
        "only integers", "pass it by mod_arrays and name it",
    ),
    "array, added": (
        lambda score, b, h, q_idx, kv_idx: score + TABLE,
        "is an array that is not in mod_arrays", "def f(..., *, table)",
    ),
    "array, first": (
        lambda score, b, h, q_idx, kv_idx: TABLE * score,
        "is an array that is not in mod_arrays", "def f(..., *, table)",
    ),
    "list": (
        lambda score, b, h, q_idx, kv_idx: score + [1.0, 2.0][h],
        "an index of something that is not in mod_arrays",
        "pass the array by mod_arrays",
    ),
    "loop": (
        lambda score, b, h, q_idx, kv_idx: score + sum(range(q_idx)),
        "the bound of a loop", "pass the array by mod_arrays",
    ),
    "its own error": (
        lambda score, b, h, q_idx, kv_idx: score + 1 / 0,
        "ZeroDivisionError", "division by zero",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_cannot_be_recorded(name):
    function, what, cure = SCORES[name]
    said = complaint(score=function)
    # A lambda's own lines, not those of the tuple around it.
    lines = {x[2] for x in function.__code__.co_lines() if x[2]}
    found = re.search(rf"{re.escape(__file__)}, line (\d+)", said)
    assert found and int(found[1]) in lines, said
    assert what in said and cure in said, said
    assert said.index(what) < said.rindex(cure), said


READS = {
    "float": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + t[h, score],
        "an index of mod_arrays['t'] is a float",
        "write np.floor(x).astype(int)",
    ),
    "slice": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + t[h, :],
        "is read by a slice", "every index is an int or a traced int",
    ),
    "few": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + t[h],
        "has 2 axes and is read by 1 indices", "give each axis one",
    ),
    "many": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + t[h, 0, 0],
        "has 2 axes and is read by 3 indices", "give each axis one",
    ),
    "as a number": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + t,
        "mod_arrays['t'] is used as a number", "read an element of it: t[...]",
    ),
    "in a function": (
        lambda score, b, h, q_idx, kv_idx, *, t: score + np.exp(t),
        "mod_arrays['t'] is used as a number", "read an element of it: t[...]",
    ),
    "after a number": (
        lambda score, b, h, q_idx, kv_idx, *, t: np.float32(2) * t,
        "mod_arrays['t'] is used as a number", "read an element of it: t[...]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_read_that_cannot_be_recorded(name):
    function, what, cure = READS[name]
    said = complaint(score=function, t=TABLE)
    assert f"{__file__}, line {first_line(function)}: " in said
    assert what in said and cure in said, said


def stores(score, b, h, q_idx, kv_idx, *, t):
    t[0, 0] = score
    return score


def test_a_store_into_an_array():
    said = complaint(score=stores, t=TABLE)
    assert f"{__file__}, line {first_line(stores) + 1}: a store into" in said
    assert "only reads" in said


def counts(score, b, h, q_idx, kv_idx):
    global COUNT
    COUNT += 1
    return score


def test_a_store_outside_the_function():
    said = complaint(score=counts)
    assert f"at line {first_line(counts) + 2}: it stores 'COUNT'" in said
    assert "not once a pair: return what you compute" in said
    assert COUNT == 0  # it has not been called


def test_a_store_into_a_closure():
    seen = 0

    def remembers(score, b, h, q_idx, kv_idx):
        nonlocal seen
        seen = q_idx
        return score + seen

    assert "it stores 'seen', which lies outside" in complaint(score=remembers)
    assert seen == 0


def test_variables_of_functions_within_are_the_functions_own():
    def sums(score, b, h, q_idx, kv_idx):
        total = score

        def add(x):
            nonlocal total
            total = total + x

        add(q_idx)
        return total

    with cuflash.emulator.active("sm_90a"):  # the error is not of recording
        cuflash.forward(Q[:, :0], Q, Q, score_mod=sums)


def test_a_million_nodes():
    def loops(score, b, h, q_idx, kv_idx):
        for _ in range(10**6):
            score = score + q_idx
        return score

    said = complaint(score=loops)
    assert f"computes more than {MOST_NODES} values a pair" in said
    assert f"line {first_line(loops) + 2}: " in said
    assert "read it by index" in said


def forever(score, b, h, q_idx, kv_idx):
    return forever(score, b, h, q_idx, kv_idx)


def forever_more(score, b, h, q_idx, kv_idx):
    return forever_more(score + 1, b, h, q_idx, kv_idx)


@pytest.mark.parametrize("function", [forever, forever_more])
def test_endless_recursion(function):
    said = complaint(score=function)
    at = f"({__file__}, line {first_line(function)})"
    assert said.startswith(f"score_mod {function.__name__!r} {at}: it calls")
    assert "never ends a recursion" in said


# ---- Arguments and results ----


def three(score, b, h):
    return score


def seven(score, b, h, q_idx, kv_idx, x, y):
    return score


@pytest.mark.parametrize(("function", "count"), [(three, 3), (seven, 7)])
def test_a_wrong_number_of_arguments(function, count):
    said = complaint(score=function)
    assert f"{__file__}, line {first_line(function)})" in said
    assert f"it takes {count} positional arguments, expected 5" in said
    assert "(score, b, h, q_idx, kv_idx, *, table)" in said


def test_a_mask_with_a_scores_arguments():
    said = complaint(mask=SCORES["if"][0])
    assert "takes 5 positional arguments, expected 4: (b, h, q_idx," in said


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda score, b, h, q_idx, kv_idx: None, "it returns None, expected"
         " a score: is `return` missing?"),
        (lambda score, b, h, q_idx, kv_idx: q_idx > 1, "it returns a bool,"
         " expected a score: pass masks as mask_mod"),
        (lambda score, b, h, q_idx, kv_idx: (score, b), "of type tuple,"
         " expected a score made of its arguments"),
        (lambda score, b, h, q_idx, kv_idx: TABLE, "of type numpy.ndarray,"
         " expected a score made of its arguments"),
        (lambda score, b, h, q_idx, kv_idx: (yield score), "of type"
         " generator, expected a score"),
    ],
)  # fmt: skip
def test_a_result_that_is_no_score(function, words):
    said = complaint(score=function)
    assert f"{__file__}, line {first_line(function)})" in said
    assert words in said


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda b, h, q_idx, kv_idx: None, "it returns None, expected a bool"),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx, "a traced int, expected"
         " a bool, True where the pair is visible"),
        (lambda b, h, q_idx, kv_idx: 1, "a traced int, expected a bool"),
        (lambda b, h, q_idx, kv_idx: q_idx / 2, "a traced real, expected"),
        (lambda b, h, q_idx, kv_idx: "yes", "of type str, expected a bool"),
    ],
)  # fmt: skip
def test_a_result_that_is_no_bool(function, words):
    said = complaint(mask=function)
    assert said.startswith("mask_mod '<lambda>'")
    assert words in said


@pytest.mark.parametrize("function", [5, "score", int, np.zeros(3)])
def test_what_is_no_function(function):
    with pytest.raises(CuflashError, match="score_mod"):
        cuflash.forward(Q, Q, Q, score_mod=function)


# ---- Arrays ----


def reads(score, b, h, q_idx, kv_idx, *, t):
    return score + t[h, q_idx]


def takes_all(score, b, h, q_idx, kv_idx, **arrays):
    return score


def test_an_argument_that_is_not_in_mod_arrays():
    said = complaint(score=reads)
    assert "its argument 't' is not in mod_arrays, which has nothing" in said
    said = complaint(score=reads, u=TABLE)
    assert "its argument 't' is not in mod_arrays, which has u" in said


def test_an_array_that_no_function_names():
    said = complaint(score=reads, t=TABLE, u=TABLE)
    assert "mod_arrays has 'u', which neither function names" in said
    assert "def f(..., *, u)" in said


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (TABLE.astype(object), DTypeError, "has dtype object, expected bool"),
        (TABLE.astype(complex), DTypeError, "has dtype complex128"),
        (TABLE.astype("M8[s]"), DTypeError, "has dtype datetime64"),
        (np.zeros([1] * 5), UnsupportedError, "has 5 axes, expected at most"
         " 4: flatten some"),
        (np.zeros(()), UnsupportedError, "has no axes: pass a number"),
        ("x", DTypeError, "'x' of type str, expected an array or a number"),
        ([1.0], DTypeError, "of type list, expected an array or a number"),
        (1j, DTypeError, "is 1j of type complex, expected an array or a"),
        (np.complex64(1), DTypeError, "of type numpy.complex64, expected"),
        (np.str_("x"), DTypeError, "of type numpy.str_, expected an array"),
    ],
)  # fmt: skip
def test_what_is_no_array(value, error, words):
    said = complaint(error, score=reads, t=value)
    assert said.startswith("mod_arrays['t']")
    assert words in said


def test_an_int_of_more_than_64_bits():
    said = complaint(
        ValueRangeError,
        score=lambda score, b, h, q_idx, kv_idx, *, n: score + n,
        n=2**63,
    )
    assert said.startswith("mod_arrays['n'] is 9223372036854775808, expected")


def adds(score, b, h, q_idx, kv_idx, *, n):
    return score + n % 2


@pytest.mark.parametrize(
    "value", [True, 3, 2.5, np.bool_(True), np.int8(3), np.float16(2.5),
              enum.IntEnum("E", "A B").B],
)  # fmt: skip
def test_numbers_of_any_type(value):
    with cuflash.emulator.active("sm_90a"):
        cuflash.forward(
            Q[:, :0], Q, Q, score_mod=adds, mod_arrays={"n": value}
        )


@pytest.mark.parametrize("value", [TABLE, 1.5])
def test_more_than_eight(value):
    many = {f"x{i}": value for i in range(9)}
    said = complaint(UnsupportedError, score=takes_all, **many)
    assert "expected at most 8: put several into one array" in said


@pytest.mark.parametrize("name", ["", "two words", 3])
def test_a_name_that_no_argument_has(name):
    with pytest.raises(DTypeError, match="keyword argument"):
        cuflash.forward(Q, Q, Q, score_mod=takes_all, mod_arrays={name: TABLE})


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k"])
def test_a_name_that_lengths_have(name):
    said = complaint(score=takes_all, **{name: TABLE})
    assert f"mod_arrays has {name!r}, expected another name" in said
    assert "is the length of its sequence" in said


def test_arrays_without_a_function():
    with pytest.raises(ValueRangeError, match="without score_mod"):
        cuflash.forward(Q, Q, Q, mod_arrays={"t": TABLE})


def test_gradients_without_a_function():
    out, lse = cuflash.forward(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueRangeError, match="^return_dmod is given without"):
        cuflash.backward(Q, Q, Q, Q, out, lse, return_dmod=("t",))


# ---- Places ----


def test_code_without_a_file_is_named():
    space = {}
    text = "def f(score, b, h, q_idx, kv_idx):\n\n    return score if b else 0"
    exec(compile(text, "<stdin>", "exec"), space)
    assert complaint(score=space["f"]).startswith("<stdin>, line 3: `if`")


def test_a_file_with_numpy_in_its_path_is_the_users():
    space = {}
    text = "def f(score, b, h, q_idx, kv_idx): return score if b else 0"
    exec(compile(text, "/home/me/numpy/models.py", "exec"), space)
    said = complaint(score=space["f"])
    assert said.startswith("/home/me/numpy/models.py, line 1: `if`")


def test_a_helpers_line_is_named():
    def ramp(x):
        return x if x > 0 else 0

    said = complaint(score=lambda score, b, h, q_idx, kv_idx: ramp(score))
    assert f"{__file__}, line {first_line(ramp) + 1}: `if`" in said


def test_numpys_own_lines_are_not_named():
    said = complaint(score=lambda score, b, h, q_idx, kv_idx: np.fix(q_idx)
                     + np.sinc(score))  # fmt: skip
    assert said.startswith(f"{__file__}, line ")
    assert sys.modules["numpy"].__file__ not in said
