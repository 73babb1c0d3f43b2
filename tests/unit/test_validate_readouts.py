"""What weights, their sums and entropies choose, and every error of theirs."""

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
from cuflash.request.readout import READOUT_GRADIENTS, READOUTS
from cuflash.request.validate import chosen
from cuflash.request.validate import readouts as validate
from helpers.compare import assert_arrays_equal
from helpers.data import Case, inputs
from helpers.derivatives import EVERYTHING, GROUPED

SHAPES = {
    "q": (2, 5, 4, 8),
    "k": (2, 7, 2, 8),
    "lse": (2, 4, 5),
    "dweights": (2, 4, 5, 7),
    "dsums": (2, 4, 7),
    "dentropy": (2, 4, 5),
    "row_weights": (2, 1, 5),
}
COTANGENTS = dict(
    zip(READOUT_GRADIENTS, ("dweights", "dsums", "dentropy"), strict=True)
)
each_call = pytest.mark.parametrize("name", [*READOUTS, *READOUT_GRADIENTS])
each_readout = pytest.mark.parametrize("name", READOUTS)
each_gradient = pytest.mark.parametrize("name", READOUT_GRADIENTS)
of_weights = pytest.mark.parametrize("name", ["weights", "weights_backward"])
of_sums = pytest.mark.parametrize(
    "name", ["weight_sums", "weight_sums_backward"]
)


def call(name, **changed):
    """Make a good call, changed."""
    names = ["q", "k", "lse"]
    names += [COTANGENTS[name]] if name in COTANGENTS else []
    given = {x: np.zeros(SHAPES[x], np.float32) for x in names}
    return getattr(cuflash, name)(**given | changed)


def complaint(error, name, **changed):
    """Return the text of the error that a good call, changed, raises."""
    with pytest.raises(CuflashError) as caught:
        call(name, **changed)
    assert caught.type is error
    return str(caught.value)


# Choices ---------------------------------------------------------------------


@of_weights
@pytest.mark.parametrize(
    "choice, length",
    [
        (slice(1, 4), 3), (slice(None, None, -1), 5), ([0, -1], 2), ([], 0),
        (range(3), 3), (np.array([1, 1], np.uint8), 2), ((2,), 1),
        (np.array([True, False, True, False, False]), 2),
    ],
    ids=str,
)  # fmt: skip
def test_what_chooses_queries(name, choice, length):
    if name == "weights":
        assert call(name, queries=choice).shape == (2, 4, length, 7)
        return
    dweights = np.zeros((2, 4, length, 7), np.float32)
    assert len(call(name, queries=choice, dweights=dweights)) == 3


def test_each_batch_element_has_its_queries():
    got = call("weights", queries=[[0, 1, 2], [4, 4, 4]], keys=[3], heads=[1])
    assert got.shape == (2, 1, 3, 1)


@pytest.mark.parametrize("dtype", [None, "float32", np.float16, "f2"])
def test_weights_have_the_dtype_of_lse_or_of_q(dtype):
    half = {x: np.zeros(SHAPES[x], np.float16) for x in "qk"}
    assert call("weights", dtype=dtype, **half).dtype == dtype or np.float32


@of_weights
@pytest.mark.parametrize(
    "which, length, most",
    [("queries", "seqlen_q", 5), ("keys", "seqlen_k", 7),
     ("heads", "num_heads_q", 4)],
)  # fmt: skip
def test_an_index_is_out_of_range(name, which, length, most):
    for index in (most, -most - 1):
        said = complaint(ValueRangeError, name, **{which: [0, index]})
        assert said == (
            f"{which}[1] is {index}, expected {-most} to {most - 1}: "
            f"{length} is {most}"
        )


def test_an_index_of_a_batch_element_is_out_of_range():
    said = complaint(ValueRangeError, "weights", queries=[[0, 1], [2, 5]])
    assert said.startswith("queries[1, 1] is 5, expected -5 to 4")


@of_sums
def test_a_query_that_counts_is_out_of_range(name):
    said = complaint(ValueRangeError, name, queries=[5])
    assert said == "queries[0] is 5, expected -5 to 4: seqlen_q is 5"


@of_weights
@pytest.mark.parametrize("which", ["queries", "keys", "heads"])
def test_one_index_is_no_choice(name, which):
    assert complaint(DTypeError, name, **{which: 3}) == (
        f"{which} is 3 of type int, expected indices or a slice: of one, "
        "pass [3]"
    )


@of_weights
@pytest.mark.parametrize("which", ["queries", "keys", "heads"])
def test_indices_are_integers(name, which):
    said = complaint(DTypeError, name, **{which: [0.5]})
    assert said == (
        f"{which} has dtype float64, expected an integer dtype: convert "
        f"{which} to int32"
    )


@of_weights
@pytest.mark.parametrize("which", ["queries", "keys", "heads"])
def test_flags_are_as_many_as_there_are(name, which):
    said = complaint(ShapeError, name, **{which: [True, False]})
    assert said.startswith(f"{which} has shape (2,), expected indices, or (")


def test_flags_on_a_device_are_no_indices():
    given = {x: np.zeros(SHAPES[x], np.float32) for x in ("q", "k", "lse")}
    flags = {"queries": np.zeros(5, bool)}  # as a device's come here
    with pytest.raises(DTypeError, match=r"pass queries.nonzero\(\)\[0\]$"):
        validate.readout("weights", given, flags, {})


def test_indices_on_a_device_are_read_to_be_checked():
    q, k = (np.zeros(SHAPES[x], np.float32) for x in "qk")
    arrays = {"keys": np.array([0, 7])}  # as a device's come here
    with pytest.raises(ValueRangeError, match=r"^keys\[1\] is 7, expected"):
        chosen.check(arrays, {"q": q, "k": k})
    chosen.check({"keys": np.array([0, 6, -7])}, {"q": q, "k": k})


def test_lists_of_several_lengths_are_no_indices():
    said = complaint(ShapeError, "weights", queries=[[0, 1], [2]])
    assert said.startswith("queries is no array of indices: setting an array")


def test_bounds_of_a_slice_are_integers():
    said = complaint(DTypeError, "weights", keys=slice(0, 2.5))
    assert said.startswith("keys is slice(0, 2.5, None): slice indices must")


@of_weights
def test_indices_have_one_axis(name):
    zeros = np.zeros((1, 1), np.int32)
    for which in ("keys", "heads"):
        said = complaint(ShapeError, name, **{which: zeros})
        assert said.startswith(f"{which} has 2 axes, expected 1: indices")


@of_weights
def test_queries_are_of_all_batch_elements_or_of_each(name):
    said = complaint(ShapeError, name, queries=np.zeros((3, 1), np.int32))
    assert said == (
        "queries has shape (3, 1), expected (n,), or (2, n) for each batch "
        "element its own"
    )


@of_sums
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 1, 5)])
def test_flags_are_of_queries(name, shape):
    said = complaint(ShapeError, name, queries=np.zeros(shape, bool))
    assert said.startswith(f"queries has shape {shape}, expected")


def test_a_dtype_is_known():
    said = complaint(DTypeError, "weights", dtype="float64")
    assert said == ("dtype is float64, expected float32, that of lse or of q")
    said = complaint(DTypeError, "weights", dtype="no")
    assert said.startswith("dtype is 'no' of type str, expected a dtype")


@of_sums
def test_a_reduction_is_known(name):
    said = complaint(ValueRangeError, name, reduce="mean")
    assert said == ("reduce is 'mean' of type str, expected 'sum' or 'max'")


# Arrays ----------------------------------------------------------------------


@of_sums
def test_row_weights_are_as_lse(name):
    zeros = np.zeros(SHAPES["row_weights"])
    assert complaint(DTypeError, name, row_weights=zeros) == (
        "row_weights has dtype float64, expected float32 as lse: they "
        "multiply rows of weights"
    )
    zeros = np.zeros((2, 5), np.float32)
    assert complaint(ShapeError, name, row_weights=zeros) == (
        "row_weights has shape (2, 5), expected one that broadcasts to "
        "(2, 4, 5) as lse has"
    )


def test_the_gradient_of_row_weights_needs_them():
    said = complaint(
        ValueRangeError, "weight_sums_backward", return_drow_weights=True
    )
    assert said == (
        "return_drow_weights is given without row_weights, expected "
        "row_weights too: it has no effect alone"
    )


@each_gradient
def test_a_cotangent_has_the_shape_of_its_readout(name):
    which = COTANGENTS[name]
    shape = (*SHAPES[which][:-1], 3)
    zeros = np.zeros(shape, np.float32)
    said = complaint(ShapeError, name, **{which: zeros})
    assert said.startswith(f"{which} has s")
    assert "expected" in said and "3" in said


@each_gradient
def test_a_cotangent_has_the_dtype_of_lse(name):
    which = COTANGENTS[name]
    wide = np.zeros(SHAPES[which], np.float64)
    said = complaint(DTypeError, name, **{which: wide})
    assert said.startswith(f"{which} has dtype float64, expected float32")


@each_call
def test_lse_is_checked_as_in_backward(name):
    said = complaint(ShapeError, name, lse=np.zeros((2, 5, 4), np.float32))
    assert said.startswith("lse has heads 5, expected 4 as in q")


@each_call
def test_a_tensor_that_requires_grad(name):
    class Tensor:
        requires_grad = True

    said = complaint(UnsupportedError, name, q=Tensor())
    assert "pass q.detach()" in said


@each_call
def test_options_are_those_of_forward(name):
    with pytest.raises(TypeError, match="window_size.*write window"):
        call(name, window_size=3)
    with pytest.raises(TypeError, match="return_dbias"):
        call(name, return_dbias=True)


@each_call
def test_dropout_needs_a_seed_and_has_no_effect(name):
    said = complaint(ValueRangeError, name, dropout=0.5)
    assert said.startswith("seed is None")
    got, want = call(name, dropout=0.5, seed=1), call(name)
    assert_arrays_equal(got[0], want[0], name)
    given = {x: np.zeros(SHAPES[x], np.float32) for x in ("q", "k", "lse")}
    options = {"dropout": 0.5, "seed": 1}
    assert validate.readout("weights", given, {}, options).problem == (
        validate.readout("weights", given, {}, {}).problem
    )


# CUFLASH_CHECK=1 -------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch):
    monkeypatch.setenv("CUFLASH_CHECK", "1")


def operands(case, **options):
    q, k, _, _ = inputs(case)
    given = {x: y for x, y in case.options().items() if x != "seed"}
    given.pop("dropout", None)
    _, lse = cuflash.forward(
        q, k, k, scale=case.scale, causal=case.causal, **given | options,
        return_lse=True,
    )  # fmt: skip
    return q, k, lse, {"scale": case.scale, "causal": case.causal, **given}


@each_readout
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_lse_of_another_call(checking, name, dtype):
    q, k, lse, given = operands(Case(dtype, **GROUPED))
    given["scale"] = 1.0
    with pytest.raises(
        ValueRangeError,
        match=r"^lse\[\d, \d, \d+\] is .*"
        "would add up to .* lse is of another call",
    ):
        getattr(cuflash, name)(q, k, lse, **given)


@each_readout
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64"]
)
@pytest.mark.parametrize("fields", [GROUPED, EVERYTHING])
def test_an_lse_of_the_call_is_none_of_another(checking, name, dtype, fields):
    q, k, lse, given = operands(Case(dtype, **fields))
    getattr(cuflash, name)(q, k, lse, **given)


def test_an_lse_of_more_keys_is_valid(checking):
    q, k, lse, given = operands(
        Case("float32", **{**GROUPED, "causal": False})
    )
    cuflash.entropy(q, k[:, :20], lse, **given)


@each_readout
@pytest.mark.parametrize("up", [True, False])
def test_roundings_of_lse_are_no_other_call(checking, name, up):
    """Those of float64, and the next float32 of them."""
    q, k, _, given = operands(Case("float32", **GROUPED))
    wide = [x.astype(np.float64) for x in (q, k)]
    _, lse = cuflash.forward(*wide, wide[1], **given, return_lse=True)
    end = np.float32(np.inf if up else -np.inf)
    lse = np.nextafter(lse.astype(np.float32), end)
    getattr(cuflash, name)(q, k, lse, **given)
